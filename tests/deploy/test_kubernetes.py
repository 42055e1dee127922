"""The manifests for Kubernetes, against the schemas. Run: pytest tests/deploy/test_kubernetes.py

Real: the schemas of Kubernetes, and those of JobSet. Not run: a cluster.
"""

import copy
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from composer_replication.cli import app
from composer_replication.options import ReplicaEnv, read_tokens

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: pip install '.[test]'"
)

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
MANIFESTS = [
    pytest.param(manifest, id=f"{path.stem}-{manifest['kind']}")
    for path in sorted(DEPLOY.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]


class Invalid(Exception):
    """A manifest is not what the schema says."""


def check(manifest):
    """Check a manifest strictly: an unknown key is an error.

    Raises:
        Invalid: It is not valid.
    """
    if manifest.get("kind") == "JobSet":
        return check_jobset(manifest)
    try:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    except (
        kubernetes_validate.ValidationError,
        kubernetes_validate.SchemaNotFoundError,
        KeyError,
    ) as error:
        raise Invalid(str(error)) from error


def check_jobset(manifest):
    jobset = pytest.importorskip(  # late, since that takes half a second
        "kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api: pip install '.[test]'"
    )
    manifest = copy.deepcopy(manifest)
    for job in manifest.get("spec", {}).get("replicatedJobs", []):
        # A Job is Kubernetes's own. JobSet's models know its schema less well.
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {}} | job.get("template", {}))
        job["template"] = {}
    try:
        parsed = jobset.JobsetV1alpha2JobSet.model_validate(copy.deepcopy(manifest))
    except ValueError as error:
        raise Invalid(str(error)) from error
    if parsed.to_dict() != manifest:  # a key that the model does not know is missing there
        raise Invalid(f"not the same as {parsed.to_dict()}")
    text = jobset.JobsetV1alpha2FailurePolicyRule.model_fields["action"].description
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        if rule["action"] not in re.findall(r"\b(?:Fail|Restart)\w+", text):
            raise Invalid(f"no action is {rule['action']}")


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_is_valid(manifest):
    check(manifest)


def manifest_of(kind):
    return next(param.values[0] for param in MANIFESTS if param.values[0]["kind"] == kind)


def containers():
    for param in MANIFESTS:
        spec = param.values[0]["spec"] if "spec" in param.values[0] else {}
        for job in spec.get("replicatedJobs", [{"template": {"spec": spec}}]):
            template = job["template"]["spec"].get("template", {"spec": {"containers": []}})
            yield from template["spec"]["containers"]


def test_what_containers_start_is_there_and_what_they_set_is_read():
    known = set(re.findall(r"\| ``(\w+)`` \|", ReplicaEnv.__doc__))
    composers = {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    found = list(containers())
    assert len(found) == 3
    for container in found:
        names = {variable["name"] for variable in container["env"]}
        assert "COMPOSER_REPLICATION_TOKEN" in names
        assert names <= known | composers
        program, name, *arguments = container["command"]
        if program == "composer-replication":
            arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
            get_command(app).commands[name].make_context(name, arguments)
        else:
            assert program == "composer" and "REPLICA_GROUP_ID" in names


def test_all_names_are_those_of_the_coordinators_manifests():
    address = f"http://{manifest_of('Service')['metadata']['name']}:29512"
    secret, claim = manifest_of("Secret"), manifest_of("PersistentVolumeClaim")
    for container in containers():
        values = {variable["name"]: variable for variable in container["env"]}
        reference = values["COMPOSER_REPLICATION_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert reference["name"] == secret["metadata"]["name"]
        assert reference["key"] in secret["stringData"]
        coordinator = values.get("COMPOSER_REPLICATION_COORDINATOR", {"value": address})
        assert coordinator["value"] == address
    claims = re.findall(r"claimName: (\S+)", "".join(p.read_text() for p in DEPLOY.glob("*.yaml")))
    assert claims == [claim["metadata"]["name"]] * 3
    assert (
        manifest_of("Deployment")["spec"]["template"]["metadata"]["labels"]
        == (manifest_of("Service")["spec"]["selector"])
    )


def test_the_token_that_nobody_has_edited_is_refused():
    with pytest.raises(ValueError, match="openssl rand -hex 16"):
        read_tokens(manifest_of("Secret")["stringData"]["token"])
