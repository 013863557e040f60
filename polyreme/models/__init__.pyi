"""For type checkers: where the names of polyreme.models stand. Written by tools/write_stubs.py."""

from polyreme.models import auto as auto
from polyreme.models import decoders as decoders
from polyreme.models import encoder_decoders as encoder_decoders
from polyreme.models import encoders as encoders
from polyreme.models import experts as experts
from polyreme.models import families as families
from polyreme.models import files as files
from polyreme.models import parts as parts
from polyreme.models import pretrained as pretrained
from polyreme.models import tokenizer as tokenizer
from polyreme.models import vision as vision
from polyreme.models.auto import *
