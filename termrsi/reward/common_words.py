"""Words of 5 letters and more that any runbook and any verifier may hold: that one compares with them tells nothing."""

_TEXT = """
    about above absent accept accepted activated active added address admin after again alias allow allowed alpha already apache
    append apply archive argument arguments array ascending async audit average backup basic batch because before below between
    binary blank block boolean branch break build bytes cache cancel change chars check chmod chown class clean clear client close
    closed column columns command commit common complete completed config connected connection contains content copied could count
    create created current database debug default delete deleted denied descending detail development different digit directory
    disabled disconnected docker double empty enable enabled entry environment equal error errors event every exact example
    executable execute execution exists exited expected export extra failed failing failure false fatal fetch field fields
    filename files final finally finish finished first fixed float folder footer forbidden format forward found function given
    global group groups guest header headers healthy hello hidden hostname hosts identical ignore inactive incomplete index
    initial initialized inner input insert install installed integer invalid items jsonl label large latest length letter letters
    level library limit lines linux local localhost locked logger login lower lowercase manager manual master match matched
    matching maximum medium memory merge message method minimum minus mismatch missing mkdir model modified module moved multiple
    names needs negative network never nginx nobody normal notes nothing number numeric object offline online option options order
    original other outer output owner package packages parent parquet parse passed passing passwd password patch paths pattern
    pending permission pipeline plain point ports positive prefix present primary print process production program proper public
    python query queue quiet quote random range ready record records regex reject rejected release remote removed rename replace
    report request reset response result results retry return reverse right round route running sample schema score script search
    second secret section select server service setting shell short should signal similar simple simply since single skipped small
    solved something sorted source space split stable stack staging start started starting state static status stderr stdin stdout
    still stopped stopping store stored stream string strip success summary switch symlink system systemd table target tasks
    terminal testing tests their there these third threads timeout title token total touch trace tracked train tuple unauthorized
    unchanged under unhealthy unique units unknown until untracked update updated upper uppercase usage username users using utils
    valid value values variable variables verbose verify version warning where which while white whole width windows without words
    working works world would write written wrong yield
"""
WORDS = frozenset(_TEXT.split())
