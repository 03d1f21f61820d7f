"""What is known to change nothing: functions, methods and attributes, by name.

``reads`` knows a block to only read when it uses nothing but these. A name is listed only if nothing that it may mean,
on any value that ``reads`` lets a block hold, changes one of its arguments or anything that outlives the call, the
random state among it. Whoever adds a name looks for an ``out`` or ``inplace`` that can be given by position
(``AT_MOST``), and for a method of lists or modules that has the same name and changes them (``list.sort``,
``nn.Module.float``).
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Mapping


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = """
    abs acos asin atan atan2 ceil clamp clip cos cosh erf exp expm1 floor frac lerp log log10 log1p log2 logical_and
    logical_not logical_or logical_xor maximum minimum nan_to_num neg negative pow reciprocal remainder round rsqrt
    sigmoid sign sin sinh softmax log_softmax sqrt square tan tanh trunc true_divide sub mul div eq ne lt le gt ge
    isclose isfinite isinf isnan allclose equal
"""
_REDUCTIONS = """
    all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum diff dist logcumsumexp
    logsumexp max mean median min mode msort nanmean nanmedian nansum norm nonzero numel prod quantile std sum topk
    trace kthvalue unique unique_consecutive var bincount histc
"""
_PRODUCTS = "addmm baddbmm bmm cov corrcoef cross dot inner kron matmul mm mv outer vdot"
_SHAPES = """
    broadcast_to chunk diag diagonal flatten flip fliplr flipud gather index_select masked_fill masked_select movedim
    narrow permute ravel repeat_interleave reshape roll rot90 scatter select split squeeze swapaxes t take
    take_along_dim tensor_split tile transpose tril triu unbind unflatten unsqueeze where
"""

TENSOR_METHODS = _names(
    _ELEMENTWISE
    + _REDUCTIONS
    + _PRODUCTS
    + _SHAPES
    + """
    bfloat16 bool clone contiguous cpu detach dim double element_size expand expand_as float half index_add index_copy
    index_fill int is_complex is_contiguous is_floating_point item long masked_scatter ndimension new_empty new_full
    new_ones new_tensor new_zeros relu repeat reshape_as scatter_add short size stride to tolist type_as unfold view
    view_as
    """
)
"""Of a tensor. A module has some of them too, and there they change it: its ``float()`` converts its weights."""

CONTAINER_METHODS = _names(
    """
    copy count endswith find get index isdigit isalpha isspace items join keys ljust lower lstrip removeprefix
    removesuffix replace rjust rstrip splitlines startswith strip title upper values
    """
)
"""Of lists, tuples, dicts, sets and strings. What they return may be an element."""

CHANGES = _names(
    "add append clear discard extend insert intersection_update pop popitem remove reverse setdefault sort update"
)
"""Methods that change a list, dict or set, and no tensor."""

MAKE = _names("clone copy item tolist numel dim size")
"""Those methods whose result nothing else holds."""

ANYWHERE = _names(
    """
    amax amin argmax argmin argsort clone count_nonzero detach dim item logsumexp mean numel reshape size square std
    sum tolist topk unsqueeze var
    """
)
"""Methods of tensors that a module does not have. It may have another module under that name; so, on what may be a
module, they are called with literals only, and there is nothing in the call that could be changed."""

ATTRIBUTES = _names(
    "H T device dtype imag indices is_cuda itemsize layout mH mT nbytes ndim real requires_grad shape values"
)
"""Of tensors, and of what ``topk`` and the like return."""

LIMITS = _names("bits eps max min smallest_normal tiny")
"""Of what ``torch.finfo`` returns."""

TOKENIZER_ATTRIBUTES = _names(
    "bos_token bos_token_id eos_token eos_token_id pad_token pad_token_id unk_token_id vocab_size"
)
TOKENIZER_METHODS = _names("batch_decode convert_ids_to_tokens convert_tokens_to_ids decode encode")

_MAKING = """
    arange as_tensor empty empty_like eye full full_like linspace logspace ones ones_like tensor zeros zeros_like
"""

FUNCTIONS: Mapping[str, frozenset[str]] = {
    "torch": _names(
        _ELEMENTWISE
        + _REDUCTIONS
        + _PRODUCTS
        + _SHAPES
        + _MAKING
        + """
        add block_diag broadcast_tensors cat cdist clone concat concatenate cosine_similarity device diag_embed einsum
        finfo hstack hypot iinfo is_floating_point is_tensor isin meshgrid relu scatter_add sort stack tensordot
        tril_indices triu_indices vstack std_mean var_mean
        """
    ),
    "torch.nn.functional": _names(
        """
        cosine_similarity cross_entropy gelu kl_div l1_loss layer_norm linear log_softmax logsigmoid mse_loss nll_loss
        normalize one_hot pad pairwise_distance relu rms_norm sigmoid silu smooth_l1_loss softmax softplus tanh
        """
    ),
    "torch.linalg": _names("det eigh eigvalsh inv matrix_norm norm pinv qr solve svd svdvals vector_norm"),
    "torch.nn": frozenset(),
    "math": frozenset(name for name in dir(math) if not name.startswith("_") and callable(getattr(math, name))),
}
"""By module."""

AT_MOST: Mapping[str, int] = {
    "torch.norm": 4,
    "torch.tensordot": 3,
    "torch.nn.functional.normalize": 4,
    "torch.nn.functional.relu": 1,
    "torch.nn.functional.silu": 1,
}
"""How many arguments by position, where a further one would be ``out`` or ``inplace``."""

MAKING = frozenset(f"torch.{name}" for name in _names(_MAKING) - {"as_tensor"})
"""Functions whose result nothing else holds."""

CONSTANTS: Mapping[str, frozenset[str]] = {
    "torch": _names(
        """
        bfloat16 bool complex64 complex128 double e float float16 float32 float64 half inf int int16 int32 int64 int8
        long nan pi short strided uint8
        """
    ),
    "math": _names("e inf nan pi tau"),
}

KEYWORDS = _names(
    """
    add_special_tokens alpha approximate axis base bias bins copy correction count decimals default descending device
    diagonal dim dim0 dim1 dims dtype end end_dim eps equal_nan fill_value flush ignore_index index indices input
    interpolation k keepdim label_smoothing largest max memory_format min mode n non_blocking normalized_shape
    num_classes offset ord other output_size p q reduction repeats return_counts return_inverse reverse rounding_mode
    rtol atol sep shape shifts size skip_special_tokens sorted split_size split_size_or_sections stable start
    start_dim step steps strict tensors unbiased value weight
    """
)
"""Keyword arguments. ``out`` and ``inplace`` change what is given, ``key`` and ``file`` call it."""

BUILTINS = _names(
    """
    abs all any bool bytes complex dict divmod enumerate float frozenset int isinstance len list max min pow print
    range repr reversed round set slice sorted str sum tuple zip
    """
)
MAKING_BUILTINS = _names("dict list set sorted tuple")
"""Those that make a container of what they are given."""
PLAIN_BUILTINS = _names("all any bool bytes complex float int isinstance len print range repr slice str")
"""Those whose result is a number, a text or nothing."""
TYPES = _names("bool bytes complex dict float frozenset int list set str tuple")
"""What ``isinstance`` may ask for, beside ``torch.Tensor``."""

ERRORS = frozenset(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "builtins"
)
"""Python's own exceptions."""
