"""A replica group that logs to TensorBoard, MLflow and W&B, all of them on files.

python logging_group.py FOLDER. See test_loggers.py.
"""

import sys
import warnings
from pathlib import Path

import mlflow
from composer.loggers import MLFlowLogger, TensorboardLogger, WandBLogger
from composer_jobs import trainer_of

from composer_replication import DiLoCoCallback


def main(folder):
    loggers = [
        TensorboardLogger(log_dir=str(folder / "tensorboard")),
        MLFlowLogger(
            experiment_name="diloco",
            tracking_uri=(folder / "mlflow").as_uri(),
            log_system_metrics=False,
            synchronous=True,
            logging_buffer_seconds=None,
        ),
        WandBLogger(project="diloco", init_kwargs={"mode": "offline", "dir": str(folder)}),
    ]
    diloco = DiLoCoCallback(sync_every=2, hostname="127.0.0.1")
    trainer = trainer_of(diloco, loggers=loggers, max_duration="4ba")
    trainer.fit()
    trainer.close()
    mlflow.end_run()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
