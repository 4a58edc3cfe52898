"""Word pools of the bundled suite: the three splits share no word, so that no file name or content repeats across them."""

SPLITS = ("train", "validation", "heldout")

_NOUNS = """
notes report data list draft memo poem story letter diary recipe menu guide table chart budget invoice order stock price
garden forest river mountain ocean island desert valley meadow bridge castle tower market harbor station apple banana
cherry orange lemon grape peach mango melon berry carrot potato tomato onion pepper garlic pumpkin bean spinach radish
tiger lion zebra monkey rabbit turtle eagle falcon sparrow pigeon dolphin whale salmon spider beetle silver copper iron
marble granite crystal amber coral pearl ruby winter summer autumn spring morning evening midnight sunrise thunder
rainbow piano guitar violin trumpet drum flute cello banjo organ harp teacher doctor farmer baker pilot sailor painter
writer singer dancer rocket planet comet galaxy meteor orbit lunar solar nebula cosmos hammer ladder bucket shovel
anchor compass lantern candle mirror pillow basket bottle kettle saucer blanket curtain carpet ribbon button pocket
canvas marker folder ticket wallet helmet jacket sandal scarf mitten sweater bonnet engine piston wheel pedal saddle
bumper gasket turbine rudder propeller
"""


def pool(split: str) -> tuple[str, ...]:
    """The words of one split: three fifths are for training, one fifth each for the others."""
    shares = {"train": (0, 1, 2), "validation": (3,), "heldout": (4,)}[split]
    return tuple(word for i, word in enumerate(_NOUNS.split()) if i % 5 in shares)
