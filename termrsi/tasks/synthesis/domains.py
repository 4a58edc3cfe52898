"""What hangs on a domain: types of skill with their primitive skills, and personas.

The names of the nine domains are Tmax's, and so are the sizes (4 to 7 types, 20 to 40 primitives, 5 to 18 personas);
every entry is ours.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Domain:
    """`skills`: type -> its primitive skills."""

    skills: dict[str, tuple[str, ...]]
    personas: tuple[str, ...]

    @property
    def primitives(self) -> tuple[str, ...]:
        """Of all types, each once."""
        return tuple(dict.fromkeys(skill for group in self.skills.values() for skill in group))


def _each(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(";"))


DOMAINS: dict[str, Domain] = {
    "security": Domain(
        skills={
            "access": _each(
                "find world-writable files; narrow a sudo rule; compare modes with a policy file; list accounts without a "
                "password; restrict a shared directory by group"
            ),
            "secrets": _each(
                "find keys that were committed; replace a leaked token everywhere; strip secrets from logs; derive a key from a "
                "passphrase; check a detached signature"
            ),
            "encodings": _each(
                "undo layers of base64 and hex; recognise a cipher by its output; read a certificate's fields; decode a session "
                "cookie; recompute an HMAC"
            ),
            "evidence": _each(
                "count failed logins by address; join events of two logs by time; reconstruct who ran a command; tell a scan "
                "from normal traffic; date a file by several clocks"
            ),
            "weak code": _each(
                "find an injection in a query; close a path traversal; make a comparison constant in time; replace a "
                "predictable random source; bound what a parser accepts"
            ),
        },
        personas=_each(
            "an incident responder on call; an auditor with a checklist; a developer told of a finding; a hobbyist in a "
            "capture-the-flag; an administrator after a break-in; a student of cryptography; a bug hunter"
        ),
    ),
    "software_engineering": Domain(
        skills={
            "building": _each(
                "write a Makefile with true dependencies; compile with several flags; link a static library; make a build "
                "repeatable byte by byte; split one module into two"
            ),
            "interfaces": _each(
                "add a command line option; keep an old call working; read settings from the environment; return exit codes as "
                "documented; print machine-readable output"
            ),
            "algorithms": _each(
                "topologically sort a graph; walk a tree without recursion; schedule with priorities; parse a small grammar; "
                "diff two sequences; keep a bounded cache"
            ),
            "version control": _each(
                "move a commit to another branch; find the commit that removed a line; resolve a conflict; write a hook; "
                "rebuild history without a file"
            ),
            "tests": _each(
                "write a table of cases; stand in for a clock; measure which lines ran; compare with golden files; test a "
                "signal handler"
            ),
        },
        personas=_each(
            "a maintainer before a release; a new colleague in the first week; a reviewer with one doubt; a build engineer; the "
            "only developer of a small firm; a teacher preparing an exercise"
        ),
    ),
    "file_operations": Domain(
        skills={
            "finding": _each(
                "select files by age; select files by size; find duplicates by content; match names with spaces; skip whole "
                "subtrees; find broken links"
            ),
            "moving": _each(
                "rename by a pattern; keep times while copying; merge two trees without losing a file; sort files into folders "
                "by date; move across a mount"
            ),
            "contents": _each(
                "replace a string in many files; cut a file into numbered parts; join parts in order; change line endings; "
                "convert a character set"
            ),
            "archives": _each(
                "pack a tree without some of it; take one file out of an archive; add to an archive; unpack nested archives; "
                "list what an archive would overwrite"
            ),
            "integrity": _each(
                "write a manifest of checksums; verify a manifest; tell which copy is damaged; replace a file in one step; lock "
                "a file against a second writer"
            ),
        },
        personas=_each(
            "a photographer with too many copies; an archivist; somebody who cleans a home directory; a backup operator; an "
            "editor with many drafts; a lab assistant"
        ),
    ),
    "data_querying": Domain(
        skills={
            "selection": _each(
                "filter by several conditions; select the latest of each group; find rows without a partner; page through a "
                "result; search text with wildcards"
            ),
            "joining": _each(
                "join tables on two keys; join a table with itself; join a file with a table; count through a link table; "
                "resolve a chain of references"
            ),
            "aggregation": _each(
                "sum by group and by whole; rank inside groups; count distinct values; compute a running total; pivot a column"
            ),
            "structure": _each(
                "draw a schema from a dump; choose an index; read a query plan; find a violated key; name the type of each column"
            ),
            "graphs": _each(
                "find all that is reachable; find the shortest chain; list cycles; compute degrees; walk a hierarchy to its roots"
            ),
        },
        personas=_each(
            "an analyst with a question from the board; a support agent with a ticket number; a librarian; a journalist with a "
            "leaked dump; an accountant at the end of a quarter; a developer without documentation"
        ),
    ),
    "data_science": Domain(
        skills={
            "preparation": _each(
                "fill missing values; mark outliers; encode categories; split by group without leakage; balance classes; scale "
                "features"
            ),
            "models": _each(
                "fit a linear model; fit a decision tree; cluster points; find nearest neighbours; factor a matrix of ratings"
            ),
            "evaluation": _each(
                "cross-validate; draw a calibration table; compare two models on the same folds; compute a confusion matrix; "
                "pick a threshold for a target recall"
            ),
            "inference": _each(
                "bootstrap an interval; test two proportions; correct for many tests; estimate a trend; simulate a null "
                "distribution"
            ),
            "practice": _each(
                "make a notebook a script; fix a seed everywhere; record parameters with results; cache a slow step; export a model"
            ),
        },
        personas=_each(
            "a doctoral student before a deadline; a product analyst; a biostatistician; a competitor in a contest; a "
            "consultant with a spreadsheet; an engineer who inherits a model; a city planner"
        ),
    ),
    "debugging": Domain(
        skills={
            "reading failures": _each(
                "find the first error of a long log; read a stack trace of another language; tell cause from consequence; map "
                "an address to a line; read a linker error"
            ),
            "narrowing": _each(
                "bisect commits; shrink an input that fails; switch off half of a configuration; reproduce what happens once in "
                "ten runs; trace what a process opens"
            ),
            "state": _each(
                "find who changed a variable; follow a descriptor that leaks; find a lock that is never released; print a "
                "structure's bytes; compare two environments"
            ),
            "logic": _each(
                "repair a boundary; repair a sort order; stop an endless loop; repair a time zone; repair rounding; repair "
                "integer overflow"
            ),
            "proof": _each(
                "write a test that fails before; show that a fix is complete; undo a workaround; time before and after; explain "
                "a fix in a note"
            ),
        },
        personas=_each(
            "a colleague of the one who wrote it; a user with a crash report; an engineer at three in the morning; a porter to "
            "another system; a student whose program is wrong; a tester"
        ),
    ),
    "scientific_computing": Domain(
        skills={
            "linear algebra": _each(
                "solve a sparse system; find dominant eigenvalues; orthogonalise vectors; bound a condition number; update a "
                "factorisation"
            ),
            "differential equations": _each(
                "integrate with an adaptive step; keep an invariant; discretise a diffusion; find a steady state; estimate the "
                "order of a method"
            ),
            "random methods": _each(
                "estimate by Monte Carlo; reduce variance; sample from a density; run a Markov chain; split random streams"
            ),
            "signals": _each("filter a noisy series; find peaks; take a spectrum; resample; align two recordings"),
            "formats and runs": _each(
                "read a fixed-width table; convert units; write a run's parameters; restart from a checkpoint; run a sweep in "
                "parallel"
            ),
        },
        personas=_each(
            "a physicist with old Fortran output; a chemist; an oceanographer; a research engineer at a cluster; a lecturer; an "
            "astronomer with a night's data"
        ),
    ),
    "data_processing": Domain(
        skills={
            "reading": _each(
                "read CSV with quotes; read JSON lines; read a nested document; skip damaged records; stream what does not fit "
                "in memory"
            ),
            "cleaning": _each(
                "trim and unify case; parse mixed dates; merge near-duplicates; repair a shifted column; replace codes by names"
            ),
            "shaping": _each("melt wide to long; group and aggregate; sort by several keys; join by a key; nest flat records"),
            "text": _each(
                "extract fields with a regular expression; count words; fill a template; normalise Unicode; number sections"
            ),
            "time": _each(
                "bucket by hour; fill gaps; shift between zones; find sessions in events; compute a moving average; compare "
                "with the week before"
            ),
            "flow": _each(
                "chain steps with a check between; process only what is new; log rejects with reasons; run parts in parallel; "
                "write results atomically"
            ),
        },
        personas=_each(
            "a data engineer; a clerk with exports of two systems; a shop owner with sales lists; a translator with string "
            "tables; an operations analyst; a volunteer who digitises registers; a meteorologist's assistant"
        ),
    ),
    "system_administration": Domain(
        skills={
            "accounts": _each(
                "create an account with a group; expire an account; set a umask; share a directory; list who may log in"
            ),
            "services": _each(
                "write a start script; restart what has died; order services; rotate logs; read a service's last words"
            ),
            "storage": _each("find what fills a disk; set a quota; back up what changed; restore one file; plan a retention"),
            "network": _each(
                "see who listens on a port; forward a port; name a host locally; serve a directory; measure a connection"
            ),
            "configuration": _each(
                "edit an INI file by key; include one file in another; check a file before use; keep two hosts alike; schedule "
                "a job; set a locale"
            ),
        },
        personas=_each(
            "the administrator of a school; a site reliability engineer; a volunteer who runs a club's server; a contractor "
            "with a handover note; a researcher who was given root; a help desk worker"
        ),
    ),
}
