"""The one room that knows verl, Ray and vLLM."""

import verl  # noqa: F401  (loads the plugin, whose hooks must wait before a module of ours imports what they wait for)
