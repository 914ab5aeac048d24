"""Sound, observations and trajectories as the input of a model."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from kinformer.core.config import check_unused
from kinformer.core.parts import Input, InputConfig
from kinformer.runtime.errors import KinformerError, plural

# Log-mel filterbanks, the features of speech recognition (Davis and Mermelstein 1980), and their normalisation.
#
#     mel(f) = 2595 log10(1 + f / 700)
#     x(t, m) = log max(floor, sum over f of w(m, f) |DFT(hann * samples of frame t)(f)|^2)
#
# w(m, .) are triangles between frequencies evenly spaced in mel; a frame is 25 ms long and begins 10 ms after the frame
# before. A feature depends on one frame only, so sound can arrive piece by piece.


FRAME, HOP = 0.025, 0.010
FLOOR = 1e-6
LEAST_DEVIATION = 0.1
PRIOR_FRAMES, PRIOR_MEAN, PRIOR_DEVIATION = 100, -6.0, 4.0

CHARACTERS = "characters"
"""The unit of spelled transcripts: a symbol is a character, not a word."""


class Filterbank:
    """The map of sound with ``rate`` samples a second to features [frames, mels]."""

    def __init__(self, rate: int, mels: int) -> None:
        self.size, self.hop = round(rate * FRAME), round(rate * HOP)
        if self.hop < 1:
            raise KinformerError(f"a sampling rate of {rate} a second is too low for speech; give 4,000 or more.")
        # The next power of two, for which the transform is fastest.
        self.points = 1 << (self.size - 1).bit_length()
        self.window = torch.hann_window(self.size)
        self.filters = mel_filters(rate, self.points, mels)

    def frames(self, samples: int) -> int:
        """Return the number of frames of this many samples, without a last part of one; less than one is filled up."""
        return 1 + max(0, samples - self.size) // self.hop

    def __call__(self, samples: Tensor) -> Tensor:
        """Return features float32 [frames, mels] of ``samples`` [time]."""
        if len(samples) < self.size:
            samples = torch.cat([samples, samples.new_zeros(self.size - len(samples))])
        power = torch.fft.rfft(samples.unfold(0, self.size, self.hop) * self.window, self.points).abs().square()
        # x(t, m) = log max(floor, sum_f w(m, f) |DFT|^2)
        return (power @ self.filters).clamp_min(FLOOR).log()


def mel_filters(rate: int, points: int, mels: int) -> Tensor:
    """Return triangles w [points // 2 + 1, mels] over the frequencies of a transform of this many points."""
    highest = 2595 * torch.log10(torch.tensor(1 + rate / 1400, dtype=torch.float64))
    edges = 700 * (10 ** (torch.linspace(0, 1, mels + 2, dtype=torch.float64) * highest / 2595) - 1)
    hertz = torch.linspace(0, rate / 2, points // 2 + 1, dtype=torch.float64)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    # A triangle is the lesser of its rising and its falling line, cut at 0.
    filters = torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp_min(0)
    if not bool((filters > 0).any(0).all()):
        raise KinformerError(
            f"`set` input.mels={mels}: some filter does not contain a frequency at {plural(rate, 'sample')} a second; "
            "give fewer."
        )
    return filters.float()


def normalised(features: Tensor) -> Tensor:
    """Return features [frames, mels] of an utterance with mean 0 and deviation 1 for every filter."""
    return (features - features.mean(0)) / features.std(0, correction=0).clamp_min(LEAST_DEVIATION)


class RunningNorm:
    """The normalisation of sound whose end is not known: by the mean and deviation up to and with each frame.

    What sound usually has counts as much as ``PRIOR_FRAMES`` frames that came before.
    """

    def __init__(self) -> None:
        self.count = PRIOR_FRAMES
        usual = torch.tensor([PRIOR_MEAN, PRIOR_MEAN**2 + PRIOR_DEVIATION**2], dtype=torch.float64)
        self.sums = usual[:, None] * PRIOR_FRAMES

    def __call__(self, features: Tensor) -> Tensor:
        """Return the next frames [frames, mels], normalised."""
        # In float64: the variance is a small difference of two large sums.
        x = features.double()
        sums = torch.stack([x, x.square()]).cumsum(1) + self.sums[:, None]
        counts = self.count + torch.arange(1, len(x) + 1)[:, None]
        mean, square = sums / counts
        if len(x):
            self.count, self.sums = self.count + len(x), sums[:, -1]
        return ((x - mean) / (square - mean.square()).clamp_min(LEAST_DEVIATION**2).sqrt()).to(features.dtype)


def normalised_features(samples: Tensor, bank: Filterbank, causal: bool) -> Tensor:
    """Return features [frames, mels] of sound, float32 [time]; ``causal``: normalised by the frames so far."""
    features = bank(samples)
    return RunningNorm()(features) if causal else normalised(features)


def features_of(samples: Tensor, bank: Filterbank, width: int, stride: int, causal: bool) -> Tensor:
    """Return :func:`normalised_features` of sound, float32 [time], as positions [positions, width, mels]."""
    return windows(normalised_features(samples, bank, causal), width, stride)


def windows(features: Tensor, width: int, stride: int) -> Tensor:
    """Return features [frames, mels] as positions [ceil(frames / stride), width, mels].

    A position is ``stride`` new frames behind the ``width - stride`` before them; zeros fill up both ends.
    """
    before = features.new_zeros(width - stride, features.shape[1])
    after = features.new_zeros(-len(features) % stride, features.shape[1])
    return torch.cat([before, features, after]).unfold(0, width, stride).mT


MOST = 6


class Frames(Input):
    """Frames of sound, sub-sampled by convolutions (as Dong et al. 2018, Speech-Transformer, in front of the encoder).

    A position is the window of frames on which its vector depends: n stacked ``convolutions`` of three frames and
    stride 2 make one vector from 2^(n + 1) - 1 frames. 2^n frames are new; the others overlap the window before.
    Positions are therefore independent of each other, chunks and padding work as for any input, and sound can be
    streamed. Values are features [batch, time, width, mels] float, of which ``stride`` frames of ``width`` are new.
    With no convolutions a position is one frame, projected.
    """

    class Config(InputConfig):
        kind = "frames"
        LEAST = {"mels": 1}
        mels: int = 40
        convolutions: int = 2

        def __post_init__(self) -> None:
            if not 0 <= self.convolutions <= MOST:
                raise KinformerError(f"convolutions must lie between 0 and {MOST}, but is {self.convolutions}.")

        @property
        def stride(self) -> int:
            """Return how many frames of a position are new."""
            return 2**self.convolutions

        @property
        def width(self) -> int:
            """Return how many frames a position has."""
            return 2 * self.stride - 1

    like: Tensor
    """Of the type of the weights."""

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.width, self.mels = config.width, config.mels
        widths = [3 * config.mels, *[3 * dim] * config.convolutions]
        self.convolutions = nn.ModuleList(nn.Linear(width, dim) for width in widths[: config.convolutions])
        self.projection = None if config.convolutions else nn.Linear(config.mels, dim)
        self.register_buffer("like", torch.zeros(()), persistent=False)

    def check(self, values: Tensor) -> None:
        expected = [self.width, self.mels]
        if values.dim() != 4 or list(values.shape[2:]) != expected or not values.is_floating_point():
            raise KinformerError(
                f"frames must be floats [batch, time, width, mels] = [batch, time, {self.width}, {self.mels}], but are "
                f"{values.dtype} {list(values.shape)}; kinformer.inputs.signals.windows makes them of features."
            )
        if not values.shape[1]:
            raise KinformerError("frames have time = 0, but must hold one position or more; wait for more sound.")

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        x = values.to(self.like.dtype)
        if self.projection is not None:
            return self.projection(x[:, :, 0])
        for convolution in self.convolutions:
            x = functional.gelu(convolution(x.unfold(2, 3, 2).mT.flatten(-2)))
        return x[:, :, 0]

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        return torch.zeros(batch, time, self.width, self.mels, device=device)


class Observations(Input):
    """Observations of an agent, one position each: norm(W [o; 1]) of values [batch, time, observation_dim] float. The
    norm makes vectors of one size of observations of any; the 1 beside them preserves how large an observation is."""

    class Config(InputConfig):
        kind = "observations"
        LEAST = {"observation_dim": 1}
        observation_dim: int

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.product = nn.Linear(config.observation_dim + 1, dim, bias=False)
        self.norm = nn.LayerNorm(dim)

    def check(self, values: Tensor) -> None:
        size = self.config.observation_dim
        if values.dim() != 3 or values.shape[1] < 1 or values.shape[2] != size or not values.is_floating_point():
            raise KinformerError(
                f"observations must be floats [batch, time, {size}] with time >= 1, but are {values.dtype} "
                f"{list(values.shape)}."
            )

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return self.norm(self.product(pad(values.to(self.product.weight.dtype), (0, 1), value=1.0)))

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        return torch.zeros(batch, time, self.config.observation_dim, device=device)


RETURN, STATE, ACTION = range(3)
"""The kinds of values."""
PER_STEP = 3
"""Positions of a step."""
KIND, TIMESTEP, FIRST = range(3)
"""What stands where in a position: its kind, its timestep, and from ``FIRST`` on the values."""
LARGEST_TIMESTEP = 1 << 24
"""Beyond it float32 no longer counts."""
LARGEST_INTENSITY = 255.0


def width_of(state_dim: int, action_dim: int) -> int:
    """Return how many numbers a position has."""
    return FIRST + max(1, state_dim, action_dim)


def pack(kind: Tensor, timestep: Tensor, values: Tensor, width: int) -> Tensor:
    """Return ``kind``, ``timestep`` [batch, time] and ``values`` [batch, time, n] as positions [batch, time, width]."""
    missing = values.new_zeros(*kind.shape, width - FIRST - values.shape[-1])
    places = torch.stack([kind, timestep], dim=-1).to(values.dtype)
    return torch.cat([places, values, missing], dim=-1)


class Steps(Input):
    """Trajectories: returns to go, states and actions, one position each (Chen et al. 2021, Decision Transformer).

        h(return R_t) = W_R R_t / scale + b_R + e_t      e_t: a learnt vector of the timestep t, the same for all three
        h(state s_t)  = W_s (s_t - mean) / std + b_s + e_t
        h(action a_t) = W_a a_t + b_a + e_t

    then a layer norm over all (the authors' control models) or tanh over the products (their Atari models). The
    Atari models have e of the row's first timestep at all its positions instead, beside a position that counts from
    there, and their states are images, which convolutions read (Mnih et al. 2015, Methods):

        h(state s) = W flatten(relu(conv(... relu(conv(s / 255))))) + b

    A position has 2 + max(1, state_dim, action_dim) numbers: its kind (``RETURN``, ``STATE`` or ``ACTION``), its
    timestep in the environment, and its values, filled up with zeros (see :func:`pack`). Discrete actions are one-hot.
    Timesteps from ``timesteps`` on count as the last timestep, as in the authors' code. Returns are divided by
    ``return_scale``. States are shifted by ``state_mean`` and divided by ``state_std`` (one number for each feature) if
    these are set. With ``image`` (channels, height, width) states are intensities from 0 to 255, read by
    ``convolutions`` (filters, side and stride of each). ``timestep``: a position has the vector of its step, or of the
    first step in the row; rows then hold every position.
    """

    class Config(InputConfig):
        kind = "steps"
        LEAST = {"state_dim": 1, "action_dim": 1, "timesteps": 1}
        ABOVE = {"return_scale": 0}
        state_dim: int
        action_dim: int
        timesteps: int = 1024
        return_scale: float = 1.0
        state_mean: tuple[float, ...] = ()
        state_std: tuple[float, ...] = ()
        entrance: Literal["norm", "tanh"] = "norm"
        timestep: Literal["each", "first"] = "each"
        image: tuple[int, ...] = ()
        convolutions: tuple[tuple[int, ...], ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))

        def __post_init__(self) -> None:
            if self.timesteps > LARGEST_TIMESTEP:
                raise KinformerError(f"timesteps must be at most {LARGEST_TIMESTEP}, but is {self.timesteps}.")
            for name in ("state_mean", "state_std"):
                if len(getattr(self, name)) not in (0, self.state_dim):
                    raise KinformerError(
                        f"{name} has {plural(len(getattr(self, name)), 'number')}, but a state has "
                        f"{plural(self.state_dim, 'feature')}; give one for each, or none."
                    )
            self._check_image()
            if not all(deviation > 0 for deviation in self.state_std):
                raise KinformerError(f"state_std must be above 0, but holds {min(self.state_std):g}.")

        def _check_image(self) -> None:
            if not self.image:
                check_unused(self, "for states other than images (`set` input.image)", "convolutions")
                return
            if len(self.image) != 3 or min(self.image) < 1:
                raise KinformerError(
                    f"image must be channels, height and width of 1 or more, but is {list(self.image)}."
                )
            if prod(self.image) != self.state_dim:
                raise KinformerError(
                    f"image is {' x '.join(map(str, self.image))}, but a state has {plural(self.state_dim, 'number')}; "
                    f"give state_dim = {prod(self.image)}, or another image."
                )
            check_unused(self, "for images, which are divided by 255", "state_mean", "state_std")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.width = width_of(config.state_dim, config.action_dim)
        self.returns = nn.Linear(1, dim)
        self.states: nn.Linear | ImageStates = nn.Linear(config.state_dim, dim)
        if config.image:
            self.states = ImageStates(config.image, config.convolutions, dim)
        self.actions = nn.Linear(config.action_dim, dim)
        self.timesteps = nn.Embedding(config.timesteps, dim)
        self.norm = nn.LayerNorm(dim) if config.entrance == "norm" else None

    def check(self, values: Tensor) -> None:
        if values.dim() != 3 or values.shape[1] < 1 or values.shape[2] != self.width or not values.is_floating_point():
            raise KinformerError(
                f"steps must be floats [batch, time, {self.width}] with time >= 1 (kind, timestep and up to "
                f"{plural(self.width - FIRST, 'value')}), but are {values.dtype} {list(values.shape)}."
            )

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        kind, timestep = values[..., KIND], values[..., TIMESTEP]
        _check_ranges(kind, timestep)
        numbers = values[..., FIRST:]
        returns = self._product(self.returns, numbers[..., :1] / self.config.return_scale)
        states = self._states(kind, numbers[..., : self.config.state_dim])
        actions = self._product(self.actions, numbers[..., : self.config.action_dim])
        kind = kind[..., None]
        # Products of numbers are computed everywhere: picking rows by kind would give shapes that depend on the data.
        x = torch.where(kind == RETURN, returns, torch.where(kind == STATE, states, actions))
        timestep = timestep.long()
        if self.config.timestep == "first":
            timestep = timestep - positions // PER_STEP
        x = x + self.timesteps(timestep.clamp(0, self.config.timesteps - 1))
        return x if self.norm is None else self.norm(x)

    def _states(self, kind: Tensor, values: Tensor) -> Tensor:
        """Return the products of states: of numbers at all positions, of images where one stands."""
        if not self.config.image:
            return self._product(self.states, self._normalised(values))
        if type(values) is not Tensor or values.is_meta or torch.compiler.is_compiling():
            return self._product(self.states, values.flatten(0, 1)).unflatten(0, kind.shape)
        # Convolutions cost more than the layers above, so the host looks where states stand, at a third of the cost.
        chosen = kind == STATE
        product = self._product(self.states, values[chosen])
        states = product.new_zeros(*kind.shape, product.shape[-1])
        states[chosen] = product
        return states

    def _product(self, linear: nn.Linear | ImageStates, values: Tensor) -> Tensor:
        y = linear(values.to(linear.weight.dtype))
        return y if self.norm is not None else y.tanh()

    def _normalised(self, states: Tensor) -> Tensor:
        if self.config.state_mean:
            states = states - states.new_tensor(self.config.state_mean)
        return states / states.new_tensor(self.config.state_std) if self.config.state_std else states

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        values = torch.zeros(batch, time, self.width, device=device)
        index = torch.arange(time, device=device)
        values[..., KIND], values[..., TIMESTEP] = index % 3, index // 3
        return values


def _check_ranges(kind: Tensor, timestep: Tensor) -> None:
    """Refuse kinds and timesteps out of range; on a GPU looking at them would wait for the device."""
    if type(kind) is not Tensor or kind.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if not bool(((kind == RETURN) | (kind == STATE) | (kind == ACTION)).all()):
        wrong = kind[(kind != RETURN) & (kind != STATE) & (kind != ACTION)]
        raise KinformerError(
            f"a step has the kind {float(wrong[0]):g}, but must be 0 (return), 1 (state) or 2 (action)."
        )
    if not bool((timestep >= 0).all()):
        raise KinformerError(f"a step has the timestep {float(timestep.min()):g}, but must be 0 or more.")


class ImageStates(nn.Module):
    """The map of intensities [n, channels * height * width] from 0 to 255 to [n, dim]. ``image``: channels, height and
    width; ``convolutions``: filters, side and stride of each."""

    def __init__(self, image: Sequence[int], convolutions: Sequence[Sequence[int]], dim: int) -> None:
        super().__init__()
        self.image = tuple(image)
        layers: list[nn.Module] = []
        channels = image[0]
        for filters, side, stride in convolutions:
            layers += [nn.Conv2d(channels, filters, side, stride), nn.ReLU()]
            channels = filters
        height, width = output_size(image, convolutions)
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(channels * height * width, dim)

    @property
    def weight(self) -> Tensor:
        """Return the weight of the last product."""
        return self.output.weight

    def forward(self, values: Tensor) -> Tensor:
        """Return vectors [n, dim] of ``values``."""
        images = values.unflatten(-1, self.image) / LARGEST_INTENSITY
        return self.output(self.layers(images).flatten(1))


def output_size(image: Sequence[int], convolutions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the height and width of the last convolution's output."""
    _, height, width = image
    for item in convolutions:
        if len(item) != 3 or min(item) < 1:
            raise KinformerError(
                f"convolutions must be lists of filters, side and stride of 1 or more, but hold {list(item)}."
            )
        _, side, stride = item
        if side > min(height, width):
            raise KinformerError(
                f"convolutions: a filter of side {side} is larger than its input, {height} x {width}; give smaller "
                "ones, or fewer, by `set` input.convolutions."
            )
        height, width = (height - side) // stride + 1, (width - side) // stride + 1
    return height, width


PARTS = {"StepInput": Steps.Config, "ObservationInput": Observations.Config, "FrameInput": Frames.Config}
