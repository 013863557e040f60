"""fluid.layers: what Programs are written with."""

from polyreme.fluid.absent import refusing
from polyreme.fluid.layers.arrays import *
from polyreme.fluid.layers.beams import *
from polyreme.fluid.layers.boxes import *
from polyreme.fluid.layers.class_loss import *
from polyreme.fluid.layers.control_flow import *
from polyreme.fluid.layers.detection import *
from polyreme.fluid.layers.distributions import *
from polyreme.fluid.layers.dynamic_rnn import *
from polyreme.fluid.layers.elementwise import *
from polyreme.fluid.layers.features import *
from polyreme.fluid.layers.host import *
from polyreme.fluid.layers.image import *
from polyreme.fluid.layers.io import *
from polyreme.fluid.layers.learning_rate_scheduler import *
from polyreme.fluid.layers.loss import *
from polyreme.fluid.layers.metric_op import *
from polyreme.fluid.layers.nn import *
from polyreme.fluid.layers.ops import *
from polyreme.fluid.layers.recurrent import *
from polyreme.fluid.layers.reduction import *
from polyreme.fluid.layers.regions import *
from polyreme.fluid.layers.sequences import *
from polyreme.fluid.layers.shape import *
from polyreme.fluid.layers.tensor import *

__getattr__ = refusing("fluid.layers", __name__)
