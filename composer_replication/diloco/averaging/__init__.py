"""The weighted mean of the groups' pseudo-gradients over a quorum, in several wire formats.

Read ``weighted_mean.py`` first.
"""
