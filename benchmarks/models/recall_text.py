"""Write the text that the recall model's tokenizer is trained on.

Every word is listed here and every sentence is drawn from a seed, so the tokenizer can be built
again anywhere and holds no other author's text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator


def _words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


NAMES = _words(
    """
    Mira Otto Zoé Lena Omar Ruth Iris Noor Hugo Anna Ben Carla David Emma Felix Greta Hana Ivan
    Jana Karl Lucy Marco Nina Oscar Paula Quinn Rosa Simon Tara Uma Viktor Wendy Yusuf Alice Bob
    Carol Jürgen Søren François Málaga
    """
)
THINGS = _words(
    """
    vault badge door garden server station letter ship train bridge river market kitchen engine
    office library museum harbour tower camera printer router cluster node agent memory cache
    model token block session project branch ticket invoice meeting report contract order
    """
)
ASPECTS = _words("code number colour name address owner port password weight price date answer")
VALUES = _words(
    """
    otter lantern quartz violin amber falcon copper meadow silver maple thunder velvet orchid
    granite saffron willow comet anchor marble cedar pepper indigo walnut glacier ember juniper
    cobalt heron basalt clover linen raven topaz barley cinder dahlia fjord ginger hazel ivory
    jasper kestrel lotus magnet nectar onyx poplar quiver ribbon sable tulip umber valley wheat
    yarrow zephyr red blue green yellow black white seven eleven twelve forty north south east
    west
    """
)
VERBS = _words(
    """
    is was are has had will can must sees keeps opens closes sends reads writes finds holds asks
    tells knows wants needs starts stops moves brings takes gives makes runs stores loads shows
    """
)
OTHER = _words(
    """
    the a an and or but not no yes in on at by to from with for of as that this these those then
    when where which who what how why because before after under over between every each all
    some any one two three four five six ten old new small large long short early late first
    last next other same good bad warm cold quiet bright dark open user please tell me my your
    our their his her its it he she they we you I do does did remember about again always never
    today tomorrow morning evening night day week month year hour minute people person place
    world house street city country water light wind rain snow sun moon star tree stone paper
    book page word line story question message list table file folder key value time error
    result request
    """
)
COMMON = _words(
    """
    about information important government development different public business company system
    program problem school child family work part case hand number group fact money power book
    room mother area home job change become leave call try feel show follow begin help talk turn
    start might hear play move live believe hold bring happen write provide stand lose pay meet
    include continue set learn lead understand watch create speak read allow add spend grow walk
    win offer consider appear buy wait serve die send expect build stay fall reach remain
    suggest because through against during without however another nothing something everything
    together already almost enough perhaps really often usually only also just still more most
    very much many few own best better high low right left great possible able common clear
    certain sure simple single several current recent main real full free use used using make
    made get got go going come came take see look think say said find know want give end name
    state service update check test data context node user put run keep store load copy share
    restart
    """
)
ENGLISH = _words(
    """
    able above accept access account across act action active actually address advance afternoon
    agree air along although among amount analysis animal anyone anything appear application
    apply approach argument arrive art aspect assume attention author available avoid away base
    basic battle beautiful beat bed behavior behind benefit beside beyond bill bit board body
    bottom box boy break brother budget building called camp cannot capital car card care career
    carry catch cause cell center central century chair challenge chance character charge choice
    choose church citizen claim clearly close coach cold collection college color command
    comment community compare complete computer concern condition conference connect contain
    control cost could count couple course court cover culture cup customer cut deal debate
    decade decide decision deep defense degree demand describe design despite detail determine
    die difference difficult dinner direction director discover discuss disease doctor document
    dog done door down draw dream drive drop during earn easily easy economic economy edge
    education effect effort either election employee energy enjoy enter entire environment
    especially establish event ever evidence exactly example exist experience explain expression
    eye face factor fail far fast father fear field fight figure fill film final finally
    financial fine finger finish fire firm fish floor fly focus food foot force foreign forget
    form former forward friend front future game gas general generation girl glass goal ground
    growth guess hair half hang happy hard head health heart heat heavy herself hotel huge human
    hundred husband idea identify image imagine impact improve increase indeed indicate
    individual industry inside institution interest interview investment involve issue item
    itself join judge key kid kind knowledge land language large late laugh law lawyer lay
    leader least left leg legal less level lie life likely limit link listen little local loss
    love machine magazine maintain major majority man manage manager marriage material matter
    maybe mean measure media medical member mention method middle military million mind miss
    mission modern moment movement movie music must myself nation natural nature near nearly
    necessary network news newspaper nice none nor note notice occur off officer official oh oil
    once operation opportunity option organization original outside owner pain painting parent
    particular partner party pass past patient pattern peace perform period personal phone
    physical pick picture piece plan plant player point police policy political poor popular
    population position positive practice prepare present president pressure pretty prevent
    private probably process produce product production professional professor property protect
    prove pull purpose push quality quickly quite race radio raise range rate rather reader
    ready reality realize reason receive recently recognize record reduce reflect region relate
    relationship religious represent research resource respond rest return reveal rich rise risk
    road rock role rule safe save scene science scientist score sea season seat second section
    security seek seem sell senior sense series serious seven shake shot shoulder side sign
    significant similar simply since sing sister sit site situation size skill skin social
    society soldier someone son song soon sort sound source southern space special specific
    speech sport staff stage standard statement step stock strategy strong structure student
    study stuff style subject success such suddenly suffer support surface task tax teach
    teacher team technology television tend term than thank theory there thing third though
    thought thousand threat throw thus title top total tough toward town trade traditional
    training travel treat treatment trial trip trouble true truth type unit until upon usually
    various view visit voice vote wall war wear well western whatever whether while whole whose
    wide wife window wish within woman wonder worker worry would wrong yard yeah yet young
    yourself
    """
)
CODE = _words("def return import self None True False print if else for while class name args len")
ACCENTED = _words(
    """
    café déjà château garçon naïve über größer Straße schön Mädchen año niño señal coração città
    perché où être élève forêt
    """
)
# Word pairs that are one token although a space lies between them. They are pairs after which no
# question ends, so a question's tokens are those of the fact it begins.
PHRASES = [
    pair.replace("_", " ")
    for pair in _words(
        """
        of_the in_the to_the on_the for_the and_the at_the with_the from_the by_the of_a in_a to_a
        with_a for_a that_the when_the if_the one_of out_of such_as as_well_as at_least so_that
        to_be because_of instead_of as_soon_as in_order_to
        """
    )
]


def _sentence(draw: random.Random) -> str:
    """Return one sentence."""
    name, thing, aspect = draw.choice(NAMES), draw.choice(THINGS), draw.choice(ASPECTS)
    values = " ".join(draw.choices(VALUES, k=draw.randint(1, 4)))
    some = " ".join(draw.choices(OTHER + COMMON, k=draw.randint(3, 9)))
    phrase, verb = draw.choice(PHRASES), draw.choice(VERBS)
    accented = " ".join(draw.choices(ACCENTED, k=2))
    return draw.choice(
        (
            f"The {thing} {aspect} of {name} is {values}.",
            f"{name}'s {thing} {aspect} is {values}.",
            f"{thing.capitalize()} {aspect} of {name}: {values}",
            f"{name} {verb} the {thing} {phrase} {draw.choice(OTHER)} {thing}, and {some}.",
            f"{some.capitalize()} {phrase} {draw.choice(THINGS)} {phrase} {draw.choice(OTHER)}.",
            f"What is the {aspect} of the {thing}? It is {values}.",
            f"Le {aspect} de {name} est {accented}.",
            f"{draw.randint(0, 9_999)} of {draw.randint(0, 99)} {values}",
        )
    )


def _code(draw: random.Random) -> str:
    """Return a few lines of code or JSON."""
    words = draw.choices(CODE + THINGS + ASPECTS, k=4)
    if draw.random() < 0.5:
        return (
            f"def {words[0]}_{words[1]}(self, {words[2]}):\n    if {words[2]} == None:\n"
            f'        return "{words[3]}"\n    print({words[1]}[{draw.randint(0, 9)}])'
        )
    return json.dumps({words[0]: words[1], words[2]: [draw.randint(0, 9), True], "name": {}})


def _tool_call(draw: random.Random) -> str:
    """Return what stands between <tool_call> and </tool_call>."""
    name = f"{draw.choice(VERBS)}_{draw.choice(THINGS)}"
    call = {"name": name, "arguments": {draw.choice(ASPECTS): draw.choice(VALUES)}}
    return f"\n{json.dumps(call)}\n"


def documents(seed: int, count: int = 6000) -> Iterator[str]:
    """Yield the training text, one short document at a time."""
    draw = random.Random(seed)
    # Every word often enough, alone and inside a line, to become one token if there is room.
    for word in NAMES + THINGS + ASPECTS + VALUES + VERBS + OTHER + PHRASES:
        yield f"is {word} is {word}\n" * 20
    for word in COMMON:
        yield f"is {word} is {word}\n" * 10
    # Not whole, but what these have in common, so that ordinary text is not all letters.
    for word in ENGLISH:
        yield f"{word} is {word}ing is {word}ed\n" * 5
    # At the beginning of a line too: a name without its space should be one token as well.
    for word in NAMES:
        yield f"{word}\n" * 20
    for word in OTHER + CODE + THINGS:
        yield f"{word}\n{word.capitalize()}\n" * 4
    for _ in range(count):
        yield _sentence(draw)
        if draw.random() < 0.2:
            yield _code(draw)
        if draw.random() < 0.1:
            yield _tool_call(draw)
