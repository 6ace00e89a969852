//! The subject of each level, and the meaning of a pass.

/// Returns what a level is about, in a word.
pub fn purpose(level: u8) -> &'static str {
    told(level).0
}

/// Returns what it means that the cases of a level passed, in a sentence.
pub fn meaning(level: u8) -> &'static str {
    told(level).1
}

fn told(level: u8) -> (&'static str, &'static str) {
    match level {
        0 => (
            "discovery",
            "The device opens, its identity and limits make sense, and its counters read plausibly.",
        ),
        1 => (
            "conformance",
            "The operation agrees with a float64 oracle within a bound that was known beforehand, writes nothing \
             outside of its operands, and gives the same bits twice.",
        ),
        2 => (
            "memory",
            "The memory that was tried keeps addresses, inversions, random patterns and moved blocks through the \
             device's own write, read, fill and copy.",
        ),
        3 => (
            "performance",
            "The point was timed after its results had been checked; where the vendor claims a number, the share of \
             it that is required was reached.",
        ),
        4 => (
            "links",
            "The transports of this host put bytes where they belong and nowhere else, and the device's own copies \
             bring back what went out.",
        ),
        5 => (
            "soak",
            "Golden results stayed the same bit by bit under alternating arithmetic and bandwidth load, and \
             throughput did not sink.",
        ),
        6 => (
            "serving",
            "A small model gives the same greedy tokens as on the CPU alone, with all of it, its prompt, or its \
             tokens on the device.",
        ),
        _ => ("", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_level_means_something_of_its_own() {
        for level in 0..=6 {
            assert!(meaning(level).ends_with('.') && !purpose(level).is_empty());
            assert!((0..level).all(|other| purpose(other) != purpose(level)), "{level}");
        }
        assert_eq!((purpose(7), meaning(7)), ("", ""));
    }
}
