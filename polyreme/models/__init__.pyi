"""For type checkers: where the names of polyreme.models stand. Written by tools/write_stubs.py."""

from polyreme.models import adapters as adapters
from polyreme.models import auto as auto
from polyreme.models import bert as bert
from polyreme.models import bitsandbytes_layout as bitsandbytes_layout
from polyreme.models import cache as cache
from polyreme.models import clip as clip
from polyreme.models import decoder as decoder
from polyreme.models import deepseek_v3 as deepseek_v3
from polyreme.models import encoder as encoder
from polyreme.models import ernie as ernie
from polyreme.models import evoformer as evoformer
from polyreme.models import families as families
from polyreme.models import folder as folder
from polyreme.models import gguf_file as gguf_file
from polyreme.models import gguf_writer as gguf_writer
from polyreme.models import gpt as gpt
from polyreme.models import llama as llama
from polyreme.models import low_bit_folder as low_bit_folder
from polyreme.models import mistral as mistral
from polyreme.models import mixtral as mixtral
from polyreme.models import packages as packages
from polyreme.models import pretrained as pretrained
from polyreme.models import published as published
from polyreme.models import qwen2 as qwen2
from polyreme.models import qwen3 as qwen3
from polyreme.models import qwen3_moe as qwen3_moe
from polyreme.models import rotary as rotary
from polyreme.models import t5 as t5
from polyreme.models import tokenizer as tokenizer
from polyreme.models import vit as vit
from polyreme.models import vocab as vocab
from polyreme.models.auto import *
