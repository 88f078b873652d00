"""
Check the manifests of KEDA and the Prometheus operator against models of their resources, as .ci/deployment does.

The models come from .ci/tools.txt and ignore unknown fields. To find such fields, the check reads and writes a manifest with
its model, and compares the result with the manifest.
"""

import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule
from manifests import read, rules


def check(model, manifest):
    """End the program when a field is wrong or unknown."""
    back = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
    if back != manifest:
        raise SystemExit(f"{manifest['kind']}: a field is unknown, only this is known: {back}")
    print(f"{manifest['kind']}: valid")


if __name__ == "__main__":
    check(ScaledObject, read("scaledobject.yaml")["ScaledObject"])
    check(PodMonitor, read("podmonitor.yaml")["PodMonitor"])
    check(PrometheusRule, yaml.safe_load(rules().stdout))
