"""The night in words: one line for a phone, sentences for the page, and how numbers are written."""


def one_line(night):
    """The night in one line, for a phone, a chat or a log."""
    s = night.summary
    if not s["rows"]:
        return f"no experiment yet: {night.path} {'is empty' if night.path.exists() else 'is not there'}"
    time = f" in {duration(s['hours']['wall'])}" if s["hours"] else ""
    parts = [f"{count(s['rows'], 'experiment')}{time}: {s['keep']} kept, {s['crash']} crashed"]
    if s["best"]:
        nothing = "" if len(night.kept) else ", nothing kept"
        parts.append(f"val_bpb {s['baseline']['val_bpb']:.6f} → {s['best']['val_bpb']:.6f} ({signed(-s['gain'])}{in_floors(s)}{nothing})")
        parts.append(f"best: {cut(s['best']['description'], 60) or s['best']['commit']}")
    else:
        parts.append("no valid result yet")
    parts += [f"no keep in the last {s['tries_since_keep']} tries"] * s["plateau"]
    parts += [f"WARNING: {len(s['fingerprints'])} fingerprints, whose numbers do not compare"] * (len(s["fingerprints"]) > 1)
    parts += [f"odd: {listed(s['odd'])}"] if s["odd"] else []
    return "; ".join(parts)


def luck_text(night):
    """What of the night may be luck, in sentences."""
    s = night.summary
    if not s["best"]:
        return "Nothing to judge yet."
    if s["noise_floor"] is None:
        again = "run the best again with other seeds. Until then a small gain may be luck, the more so the more was tried."
        return f"The noise floor is not known: {again}"
    small = [f"#{row['number']}" for row in s["keeps"] if row["luck"] is not None and row["gain"] < row["luck"]]
    which = f": {', '.join(small)}" if small else ""
    return (
        f"The noise floor is {s['noise_floor']:.6f}: the standard deviation over {s['noise_runs']} runs that differ only in the seed. "
        f"{count(s['tries'], 'try')} that changed nothing would by luck be expected to end {s['luck']:.6f} below the baseline; "
        f"this night ended {s['gain']:.6f} below it{in_floors(s)}. "
        f"{len(small)} of {max(0, len(s['keeps']) - 1)} keeps gained less than luck would in as many tries{which}."
    )


def hours_text(night):
    time = night.summary["hours"]
    if not time:
        return "No runs beside this ledger say how long they took."
    return (
        f"{count(time['runs'], 'run')} in {duration(time['wall'])}, {time['runs'] / time['wall']:.1f} an hour; "
        f"{100 * time['training'] / time['wall']:.0f} % of the time was training. Runs without a result took {duration(time['lost'])}."
    )


def in_floors(s):
    return "" if s["gain_in_noise_floors"] is None else f", {s['gain_in_noise_floors']:.1f} noise floors"


def listed(counts):
    return ", ".join(f"{n} × {what}" for what, n in counts.items())


def count(n, word):
    plural = word[:-1] + "ies" if word.endswith("y") else word + "s"
    return f"{n:,} {word if n == 1 else plural}"


def cut(text, length):
    """The text, where it is longer its whole words that fit."""
    if len(text) <= length:
        return text
    words = text[:length].rpartition(" ")[0]
    return (words if len(words) > length / 2 else text[: length - 1]).rstrip(" ,;.:") + "…"


def signed(value, digits=6):
    return f"{value + 0.0:+.{digits}f}".replace("-", "−")  # + 0.0: no −0


def duration(hours):
    return f"{hours:.1f} h" if hours >= 1.5 else f"{hours * 60:.0f} min" if hours * 60 >= 1.5 else f"{hours * 3600:.0f} s"
