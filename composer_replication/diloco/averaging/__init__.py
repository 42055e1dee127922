"""The weighted mean of the groups' pseudo-gradients over a quorum, in several wire formats.

Read ``weighted_mean.py`` first. ``make_mean``, in ``quantized_mean.py``, chooses.
"""
