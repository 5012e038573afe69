"""A cluster of two Sparks on one machine, of real parts: see rig.py."""

from cluster_rig.relay import Relay
from cluster_rig.rig import Rig, RigNode, image_id, why_not

__all__ = ["Relay", "Rig", "RigNode", "image_id", "why_not"]
