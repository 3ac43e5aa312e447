"""Which frames of speech each token belongs to, by the weights of cross-attention."""

import numpy as np

FRAME = 0.02  # seconds of one of the encoder's frames
WIDTH = 7  # frames that the median is taken over


def token_starts(weights):
    """Return when each token begins, in seconds.

    Parameters
    ----------
    weights : array, shape (num_heads, num_tokens, num_frames)
        Rows of the heads that align: the row *before* a token chooses it, so the first row is
        that of the last token that was given.

    Returns
    -------
    array, shape (num_tokens,)
        First frame of each token on the best monotonic path, times its length.

    References
    ----------
    arXiv 2212.04356 (Whisper); openai-whisper, which first read times off these heads.
    """
    weights = np.asarray(weights, dtype=np.float64)
    # Frames that every token looks at tell nothing: each is compared with its own mean.
    spread = weights.std(axis=1, keepdims=True)
    weights = (weights - weights.mean(axis=1, keepdims=True)) / spread
    edge = WIDTH // 2
    mirrored = np.pad(weights, ((0, 0), (0, 0), (edge, edge)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(mirrored, WIDTH, axis=-1)
    path = best_path(np.median(windows, axis=-1).mean(axis=0))
    first = [path[path[:, 0] == token, 1].min() for token in range(weights.shape[1])]
    return np.array(first) * FRAME


def best_path(gain):
    """Return the pairs (token, frame) of the monotonic path with the largest sum of gains.

    Each step goes to the next token, the next frame, or both; it leads from the first of both to
    the last of both.
    """
    tokens, frames = gain.shape
    best = np.full((tokens + 1, frames + 1), -np.inf)
    best[0, 0] = 0
    steps = ((1, 1), (1, 0), (0, 1))
    step = np.zeros(gain.shape, dtype=int)
    for i, j in np.ndindex(*gain.shape):
        before = [best[i + 1 - down, j + 1 - right] for down, right in steps]
        step[i, j] = np.argmax(before)
        best[i + 1, j + 1] = gain[i, j] + max(before)
    path = [(tokens - 1, frames - 1)]
    while path[-1] != (0, 0):
        i, j = path[-1]
        down, right = steps[step[i, j]]
        path.append((i - down, j - right))
    return np.array(path[::-1])
