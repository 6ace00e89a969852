//! Mutates inputs: bits, bytes, pieces, numbers and parts of other inputs. Equal seeds give equal mutations.

use mixfleet_hal::cast::to_usize;
use mixfleet_hal::random::Stream;

/// Longer inputs are truncated, since errors with long inputs also occur with short ones, and sooner.
const BYTES_MAX: usize = 16 << 10;
const CHANGES_MAX: u64 = 6;
const WORD_BYTES_MAX: usize = 40;

/// Numbers at the limits of types and formats.
const EXTREMES: &[&str] = &[
    "0",
    "-0.0",
    "-1",
    "1",
    "0.5",
    "1e-320",
    "5e-324",
    "1e-9",
    "127",
    "255",
    "256",
    "65535",
    "65536",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e15",
    "1e300",
    "1.7976931348623157e308",
    "1e999",
    "nan",
    "inf",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
];

const BYTES: &[u8] = &[0, 1, 7, b'\n', b' ', b'"', b'%', b'[', b'{', b'}', b']', 0x7f, 0x80, 0xc0, 0xff];

/// Derives inputs from a corpus.
pub(crate) struct Mutator<'a> {
    corpus: &'a [Vec<u8>],
    /// Runs of letters and digits in the corpus.
    words: Vec<&'a [u8]>,
}

impl<'a> Mutator<'a> {
    pub(crate) fn new(corpus: &'a [Vec<u8>]) -> Self {
        let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        let runs = corpus.iter().flat_map(|input| input.split(move |byte| !is_word(byte)));
        let mut words: Vec<&[u8]> = runs.filter(|run| (1..=WORD_BYTES_MAX).contains(&run.len())).collect();
        words.sort_unstable();
        words.dedup();
        Mutator { corpus, words }
    }

    /// An input derived from `seed`.
    pub(crate) fn input(&self, seed: u64) -> Vec<u8> {
        let mut random = Stream::new(seed);
        let mut bytes = pick(&mut random, self.corpus).cloned().unwrap_or_default();
        // Most inputs stay close to accepted ones.
        let changes_max = 1 + random.below(2) * random.below(CHANGES_MAX);
        for _ in 0..1 + random.below(changes_max) {
            self.change(&mut bytes, &mut random);
            bytes.truncate(BYTES_MAX);
        }
        bytes
    }

    fn change(&self, bytes: &mut Vec<u8>, random: &mut Stream) {
        let at = to_usize(random.below(bytes.len() as u64 + 1));
        let range = at..(at + 1 + to_usize(random.below(16))).min(bytes.len());
        match random.below(12) {
            0 if !range.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !range.is_empty() => bytes[at] = pick(random, BYTES).copied().unwrap_or_default(),
            2 => drop(bytes.drain(range)),
            3 => {
                let end = bytes.len().min(at + to_usize(random.below(bytes.len() as u64 + 1)));
                drop(bytes.drain(at..end));
            }
            4 => bytes.truncate(at),
            5 => {
                let piece = bytes[range].to_vec();
                let times = 1 + to_usize(random.below(200));
                drop(bytes.splice(at..at, piece.repeat(times)));
            }
            6 => {
                let from = to_usize(random.below(bytes.len() as u64 + 1));
                let piece = bytes[from..bytes.len().min(from + 64)].to_vec();
                drop(bytes.splice(range, piece));
            }
            7 => drop(bytes.splice(at..at, random.next_u64().to_le_bytes())),
            8 => {
                // The head of this input, and the tail of another.
                if let Some(other) = pick(random, self.corpus) {
                    let from = to_usize(random.below(other.len() as u64 + 1));
                    bytes.truncate(at);
                    bytes.extend_from_slice(&other[from..]);
                }
            }
            9 => {
                if let Some(word) = pick(random, &self.words) {
                    drop(bytes.splice(at..at, word.iter().copied()));
                }
            }
            10 => {
                let word = pick(random, &self.words).copied().unwrap_or_default();
                drop(bytes.splice(
                    word_at(bytes, at, |byte| byte.is_ascii_alphanumeric() || byte == b'_'),
                    word.iter().copied(),
                ));
            }
            _ => {
                let number = pick(random, EXTREMES).copied().unwrap_or_default();
                drop(bytes.splice(
                    word_at(bytes, at, |byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'+' | b'-')),
                    number.bytes(),
                ));
            }
        }
    }
}

/// The first run of such bytes at or after `at`.
fn word_at(bytes: &[u8], at: usize, is_part: fn(u8) -> bool) -> std::ops::Range<usize> {
    let start = bytes[at..].iter().position(|byte| is_part(*byte)).map_or(bytes.len(), |step| at + step);
    let end = bytes[start..].iter().position(|byte| !is_part(*byte)).map_or(bytes.len(), |step| start + step);
    start..end
}

fn pick<'a, T>(random: &mut Stream, among: &'a [T]) -> Option<&'a T> {
    among.get(to_usize(random.below(among.len().max(1) as u64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_input_and_others_make_others() {
        let corpus = [b"{\"a\": 17, \"bc\": [1, 2]}".to_vec(), b"name = 'x'".to_vec()];
        let mutator = Mutator::new(&corpus);
        let inputs: Vec<_> = (0..500).map(|seed| mutator.input(seed)).collect();
        assert_eq!(inputs, (0..500).map(|seed| mutator.input(seed)).collect::<Vec<_>>());
        let distinct: std::collections::BTreeSet<_> = inputs.iter().collect();
        assert!(distinct.len() > 400, "{}", distinct.len());
        assert!(inputs.iter().all(|input| input.len() <= BYTES_MAX));
        let has = |word: &[u8]| inputs.iter().any(|input| input.windows(word.len()).any(|part| part == word));
        assert!(has(b"18446744073709551616") && has(b"name"));
    }

    #[test]
    fn nothing_is_changed_into_something() {
        let empty = Mutator::new(&[]);
        assert!((0..100).any(|seed| !empty.input(seed).is_empty()));
    }
}
