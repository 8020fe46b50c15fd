"""The expert of both games of numbers."""


def bisect(number: int, low: int, high: int) -> list[str]:
    """Guesses that find a number by halving what is left."""
    guesses = []
    while not guesses or guesses[-1] != number:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if guesses[-1] < number else (low, guesses[-1] - 1)
    return [str(guess) for guess in guesses]
