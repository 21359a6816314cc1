"""``GetInfoResponse``, ``ModelData``, under the path of the official SDK."""

from tinkex.types import GetInfoResponse, ModelData

__all__ = ["GetInfoResponse", "ModelData"]
