"""``AccessibleSearchOwner``, ``OwnSearchOwner``, ``SearchOwner``, ``UserSearchOwner``, under the path of the official SDK."""

from tinkex.types import AccessibleSearchOwner, OwnSearchOwner, SearchOwner, UserSearchOwner

__all__ = ["AccessibleSearchOwner", "OwnSearchOwner", "SearchOwner", "UserSearchOwner"]
