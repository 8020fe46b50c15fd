"""A tree's rows as one sequence in which each shared token stands once. torch and transformers only.

:mod:`trie` packs rows, :mod:`attention` makes each token see its own path, :mod:`attach` brings that into a model,
:mod:`forward` runs the model, :mod:`likelihood` makes log-probs and entropies of its logits, which go back onto the rows.
:mod:`batching` cuts micro-batches that keep trees whole; :mod:`chunked` computes a tree in :mod:`chunks`, which trades one
more forward for much less memory.
"""

from verl_bpo.model.packed_tree.attention import BACKENDS, PackedTreeUnsupported, choose_backend
from verl_bpo.model.packed_tree.batching import MicroBatch, place_rows, plan_micro_batches
from verl_bpo.model.packed_tree.chunked import HiddenReads, chunked_outputs
from verl_bpo.model.packed_tree.forward import RowOutputs, packed_forward, row_outputs, tree_outputs, wanted_logits
from verl_bpo.model.packed_tree.trie import PackedTree, pack_rows, sort_rows

__all__ = [
    "BACKENDS",
    "HiddenReads",
    "MicroBatch",
    "PackedTree",
    "PackedTreeUnsupported",
    "RowOutputs",
    "choose_backend",
    "chunked_outputs",
    "pack_rows",
    "packed_forward",
    "place_rows",
    "plan_micro_batches",
    "row_outputs",
    "sort_rows",
    "tree_outputs",
    "wanted_logits",
]
