"""Composer's algorithms, as rows of docs/composer.md."""

from composer import algorithms as composer_algorithms
from composer_parts.fits import REJECTED, WITH_NOTE, WORKS, Part
from composer_parts.models import LENGTH, binary_data, picture_data, text, text_data, untied_text


def algorithm(name, *args, status=WORKS, trainer=None, kwargs=None, **part):
    """The row of an algorithm; its own arguments, then the ``Part``'s."""
    part = {"changes": True, "resumes": True} | part

    def build():
        one = getattr(composer_algorithms, name)(*args, **kwargs or {})
        return {"algorithms": [one]} | (trainer or {})

    return name, Part(status=status, build=build, **part)


FOR_TEXT = {"model": text, "data": text_data, "needs": ["transformers"]}
NEEDS_AMP = {
    "needs_gpu": True,
    "trainer": {"precision": "amp_bf16"},
    "error": "AMP_BF16 is not supported for CPU training",
}

ALGORITHMS = dict(
    [
        algorithm("Alibi", LENGTH, status=WITH_NOTE, **FOR_TEXT | {"model": untied_text}),
        algorithm("AugMix", data=picture_data),
        algorithm("BlurPool"),
        algorithm("ChannelsLast", changes=False),
        algorithm("ColOut", kwargs={"p_row": 0.3, "p_col": 0.3}),
        algorithm("CutMix"),
        algorithm("CutOut"),
        algorithm(
            "EMA", kwargs={"half_life": "2ba"}, status=WITH_NOTE, averages=True, changes=False
        ),
        algorithm(
            "Factorize", kwargs={"min_channels": 16, "min_features": 4, "latent_features": 2}
        ),
        algorithm("GatedLinearUnits", **FOR_TEXT),
        algorithm("GhostBatchNorm", 2),
        algorithm("GradientClipping", "norm", 0.1),
        algorithm("GyroDropout", kwargs={"sigma": 8, "tau": 4}, status=WITH_NOTE, resumes=False),
        algorithm("LabelSmoothing"),
        algorithm("LayerFreezing", 0.0, status=WITH_NOTE, resumes=False),
        algorithm("LowPrecisionGroupNorm", **NEEDS_AMP),
        algorithm("LowPrecisionLayerNorm", **NEEDS_AMP),
        algorithm("MixUp"),
        algorithm("NoOpModel", data=binary_data),
        algorithm("ProgressiveResizing"),
        algorithm("RandAugment", data=picture_data),
        algorithm("SAM", status=WITH_NOTE, resumes=False),
        algorithm("SWA", status=REJECTED, error="SWA puts its average into the model"),
        algorithm("SelectiveBackprop", 0.1, 0.9, 0.5),
        algorithm(
            "SeqLengthWarmup", 0.5, 8, LENGTH, 4, status=WITH_NOTE, resumes=False, **FOR_TEXT
        ),
        algorithm("SqueezeExcite", 4, 16),
        algorithm("StochasticDepth", "ResNetBottleneck"),
        algorithm("WeightStandardization"),
    ]
)
