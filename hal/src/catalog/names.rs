//! Suggests known names for mistyped ones.

const NAMES_MAX: usize = 5;

/// Returns the `candidates` most similar to `wanted`, best first and at most five, ignoring case and anything
/// but letters and digits; candidates that are too different are left out.
pub fn closest_names<'a>(wanted: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let wanted = plain(wanted);
    if wanted.is_empty() {
        return Vec::new();
    }
    let mut scored: Vec<(usize, &str)> = candidates
        .into_iter()
        .filter_map(|name| {
            let known = plain(name);
            let inside = contains(&known, &wanted) || contains(&wanted, &known);
            let distance = edits(&wanted, &known);
            // a part of a name is a good guess, even if much of the name is missing
            let score = if inside { distance.min(1) } else { distance };
            (inside || distance * NEAR <= wanted.len().max(known.len())).then_some((score, name))
        })
        .collect();
    scored.sort_by_key(|&(score, name)| (score, name.len()));
    scored.truncate(NAMES_MAX);
    scored.into_iter().map(|(_, name)| name).collect()
}

/// Returns the `candidates` that begin with `wanted`, ignoring case and punctuation.
///
/// Runs of letters and of digits are compared whole: `rtx 40` does not begin `RTX-4090`, and `h100sxm` begins
/// `H100-SXM-80GB`.
pub fn names_that_begin<'a>(wanted: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let wanted = runs(wanted);
    let begins = |name: &&str| !wanted.is_empty() && runs(name).starts_with(&wanted);
    candidates.into_iter().filter(begins).collect()
}

/// Returns whether one name is a typing mistake of the other: at most a third of its characters differ.
pub fn is_near(one: &str, other: &str) -> bool {
    let (one, other) = (plain(one), plain(other));
    edits(&one, &other) * NEAR <= one.len().max(other.len())
}

/// One in this many characters of a name may be mistyped.
const NEAR: usize = 3;

/// Splits a name into its runs of letters and of digits, in lower case.
fn runs(name: &str) -> Vec<String> {
    let mut runs: Vec<String> = Vec::new();
    let mut last = ' ';
    for c in name.chars().flat_map(char::to_lowercase) {
        let goes_on = last.is_alphanumeric() && last.is_numeric() == c.is_numeric();
        match runs.last_mut() {
            Some(run) if goes_on && c.is_alphanumeric() => run.push(c),
            _ if c.is_alphanumeric() => runs.push(c.to_string()),
            _ => {}
        }
        last = c;
    }
    runs
}

fn plain(name: &str) -> Vec<char> {
    name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

fn contains(whole: &[char], piece: &[char]) -> bool {
    !piece.is_empty() && whole.windows(piece.len()).any(|window| window == piece)
}

/// Counts insertions, deletions, substitutions and swaps of neighbours between the two (optimal string
/// alignment).
fn edits(a: &[char], b: &[char]) -> usize {
    let mut rows = [vec![0; b.len() + 1], (0..=b.len()).collect()];
    for (i, x) in a.iter().enumerate() {
        let [before, last] = &rows;
        let mut row = vec![i + 1; b.len() + 1];
        for (j, y) in b.iter().enumerate() {
            row[j + 1] = (last[j] + usize::from(x != y)).min(row[j] + 1).min(last[j + 1] + 1);
            if i > 0 && j > 0 && (x, &a[i - 1]) == (&b[j - 1], y) {
                row[j + 1] = row[j + 1].min(before[j - 1] + 1);
            }
        }
        let [_, last] = rows;
        rows = [last, row];
    }
    rows[1][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        let count = |a: &str, b: &str| edits(&plain(a), &plain(b));
        assert_eq!(count("kitten", "sitting"), 3);
        assert_eq!(count("", "abc"), 3);
        assert_eq!((count("cuont", "count"), count("ab", "ba"), count("abc", "cab")), (1, 1, 2));
        assert_eq!(count("RTX 4090", "rtx-4090"), 0);
    }

    #[test]
    fn whole_runs_begin_a_name_and_parts_of_them_do_not() {
        let names = ["H100-SXM-80GB", "H100-PCIe-80GB", "L4", "L40S", "RTX-4090"];
        assert_eq!(names_that_begin("h100", names), ["H100-SXM-80GB", "H100-PCIe-80GB"]);
        assert_eq!(names_that_begin("h100sxm", names), ["H100-SXM-80GB"]);
        assert_eq!(names_that_begin("L40", names), ["L40S"]);
        assert_eq!(names_that_begin("rtx4090", names), ["RTX-4090"]);
        for none in ["rtx-40", "", "-"] {
            assert!(names_that_begin(none, names).is_empty(), "{none}");
        }
        assert!(is_near("polcy", "policy") && is_near("Llama3.1-8B", "llama-3.1-8b"));
        assert!(!is_near("host", "no-pin") && !is_near("run", "plan"));
    }

    #[test]
    fn pieces_and_typing_mistakes_find_names_and_nonsense_finds_none() {
        let names = ["RTX-4090", "RTX-3090", "H100-SXM-80GB", "H100-PCIe-80GB"];
        assert_eq!(closest_names("4090", names), ["RTX-4090"]);
        assert_eq!(closest_names("rtx 4099", names)[0], "RTX-4090");
        assert_eq!(closest_names("h100", names), ["H100-SXM-80GB", "H100-PCIe-80GB"]);
        assert!(closest_names("pineapple", names).is_empty());
        assert!(closest_names("", names).is_empty());
    }
}
