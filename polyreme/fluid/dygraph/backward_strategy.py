"""How 1.7 adds gradients up, which changes nothing here."""

from polyreme.eager.walk import StartsFromOnes


class BackwardStrategy(StartsFromOnes):
    """What may be given to backward(). sort_sum_gradient: gradients are always added in the order of the forward."""

    sort_sum_gradient = False


__all__ = ["BackwardStrategy"]
