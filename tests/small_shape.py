"""A model small enough to count by hand."""

from termrsi.sizing import shapes

FIELDS = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPE = shapes.of(FIELDS)
