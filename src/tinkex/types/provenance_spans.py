"""``PromptProvenanceSpan``, ``ProvenanceSpans``, ``SampledProvenanceSpan``, under the path of the official SDK."""

from tinkex.types import PromptProvenanceSpan, ProvenanceSpans, SampledProvenanceSpan

__all__ = ["PromptProvenanceSpan", "ProvenanceSpans", "SampledProvenanceSpan"]
