//! The rows of a step that a member attends to where pages of KV are divided among members.
//!
//! A member that has all pages of a sequence computes its attention as a single device does. If several
//! members have some, each computes every row that sees a local key: as a decode over the keys of the local
//! pages, in sequence, since the order of keys does not matter to attention.

use super::attention::{AttentionTables, Reaches, attention_sizes};
use super::graph::StepInput;
use mixfleet_hal::cast::to_u32;
use mixfleet_scheduler::layers::{AttentionSizes, KvSizes, visible_keys};
use std::borrow::Cow;

/// A member's work in a step.
pub(super) struct HeldRows {
    /// The rows of the step that the member computes: `partial` ones, other decodes, prefills.
    pub(super) rows: Vec<u32>,
    /// Rows that may see keys on other members too.
    pub(super) partial: u32,
    /// The rows of the step whose keys and values the member writes.
    pub(super) written: Vec<u32>,
    pub(super) sizes: AttentionSizes,
    pub(super) tables: AttentionTables,
}

/// A row with keys in `ranges`, one per window, in `pages`.
struct OneRow {
    row: u32,
    ranges: Vec<[u32; 2]>,
    /// Index among lists of pages.
    pages: usize,
}

/// The pages of a sequence on a member.
struct OwnPages {
    /// Their indices in the sequence.
    blocks: Vec<u32>,
    block_tokens: u32,
}

impl OwnPages {
    /// Number of local keys before `position`.
    fn keys_before(&self, position: u32) -> u32 {
        let whole = self.blocks.partition_point(|block| (block + 1) * self.block_tokens <= position);
        let part =
            self.blocks.get(whole).map_or(0, |block| position.saturating_sub(block * self.block_tokens));
        to_u32(whole) * self.block_tokens + part
    }

    /// The local keys that a query at `position` sees.
    fn range(&self, position: u32, window: Option<u32>) -> [u32; 2] {
        let first = position + 1 - to_u32(visible_keys(position, window));
        [self.keys_before(first), self.keys_before(position + 1)]
    }
}

impl HeldRows {
    /// The held pages of the member with the pages whose number is `at` modulo `of`, under their number
    /// divided by `of`.
    pub(super) fn of(
        parts: &[StepInput<'_>],
        (at, of): (u32, u32),
        block_tokens: u32,
        windows: &[Option<u32>],
    ) -> Self {
        let (mut partial, mut whole, mut prefills) = (Vec::new(), Vec::new(), Vec::new());
        let (mut written, mut slots, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        let mut first_row = 0;
        for part in parts {
            let (start, end) = (part.start, part.start + to_u32(part.tokens.len()));
            let row = first_row;
            first_row += end - start;
            let used = &part.pages[..end.div_ceil(block_tokens) as usize];
            for position in start..end {
                let page = used[(position / block_tokens) as usize];
                if page % of == at {
                    slots.push(page / of * block_tokens + position % block_tokens);
                    written.push(row + position - start);
                }
            }
            let own = used.iter().zip(0..).filter(|(page, _)| *page % of == at);
            let (numbers, blocks): (Vec<u32>, Vec<u32>) = own.map(|(page, block)| (page / of, block)).unzip();
            if numbers.is_empty() {
                continue;
            }
            let has_all = numbers.len() == used.len();
            let (list, own) = (pages.len(), OwnPages { blocks, block_tokens });
            pages.push(numbers);
            if has_all && part.tokens.len() > 1 {
                prefills.push((row, part, list));
            } else {
                let rows = if has_all { &mut whole } else { &mut partial };
                rows.extend((start..end).zip(row..).filter_map(|(position, row)| {
                    let ranges: Vec<_> = windows.iter().map(|&window| own.range(position, window)).collect();
                    let sees = ranges.iter().any(|[first, end]| first < end);
                    sees.then_some(OneRow { row, ranges, pages: list })
                }));
            }
        }
        let partial_rows = to_u32(partial.len());
        let ones: Vec<OneRow> = partial.into_iter().chain(whole).collect();
        let prefill: Vec<StepInput<'_>> = prefills
            .iter()
            .map(|&(_, part, list)| StepInput { pages: &pages[list], ..part.clone() })
            .collect();
        let of_prefills = prefills.iter().flat_map(|(row, part, _)| *row..row + to_u32(part.tokens.len()));
        let rows: Vec<u32> = ones.iter().map(|one| one.row).chain(of_prefills).collect();

        // pages that are divided among members belong to all layers
        let reaches = Reaches { windows, parts: 1 };
        let mut sizes = attention_sizes(&[], &prefill, reaches);
        sizes.tokens = to_u32(rows.len());
        sizes.written = to_u32(written.len());
        sizes.decodes = to_u32(ones.len());
        sizes.partial = partial_rows;
        sizes.decode_pages_max = ones.iter().map(|one| to_u32(pages[one.pages].len())).max().unwrap_or(0);
        for (which, kv) in sizes.kv.iter_mut().enumerate() {
            let keys = ones.iter().map(|one| u64::from(one.ranges[which][1] - one.ranges[which][0])).sum();
            *kv = KvSizes { decode_tokens: keys, ..*kv };
        }
        let mut tables = AttentionTables::of(&[], &prefill, block_tokens, &sizes, reaches);
        tables.slots = vec![slots];
        let lists = ones.iter().map(|one| Cow::Borrowed(&pages[one.pages][..]));
        tables.decode_pages = vec![AttentionTables::padded(lists, sizes.decode_pages_max)];
        for (which, ranges) in tables.ranges.iter_mut().enumerate() {
            *ranges = ones.iter().flat_map(|one| one.ranges[which]).collect();
        }
        HeldRows { rows, partial: partial_rows, written, sizes, tables }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part<'a>(start: u32, tokens: &'a [u32], pages: &'a [u32]) -> StepInput<'a> {
        StepInput { start, tokens, pages, draw: None }
    }

    #[test]
    fn a_sequence_in_one_members_pages_stays_whole_and_others_do_nothing() {
        let parts = [part(9, &[0], &[2, 4, 6]), part(0, &[0; 5], &[3, 5])];
        let windows = [None];
        let even = HeldRows::of(&parts, (0, 2), 4, &windows);
        assert_eq!((&even.rows[..], even.partial, &even.written[..]), (&[0][..], 0, &[0][..]));
        assert_eq!(
            (&even.tables.slots[0][..], &even.tables.decode_pages[0][..]),
            (&[13][..], &[1, 2, 3][..])
        );
        assert_eq!(even.tables.ranges, [[0, 10]]);
        let odd = HeldRows::of(&parts, (1, 2), 4, &windows);
        assert_eq!((&odd.rows[..], odd.partial, odd.sizes.prefills), (&[1, 2, 3, 4, 5][..], 0, 1));
        assert_eq!(
            (&odd.tables.slots[0][..], &odd.tables.prefill_pages[0][..]),
            (&[4, 5, 6, 7, 8][..], &[1, 2][..])
        );
        let none = HeldRows::of(&parts[..1], (1, 2), 4, &windows);
        assert!(none.rows.is_empty() && none.written.is_empty());
    }

    #[test]
    fn rows_of_a_divided_sequence_see_every_key_exactly_once() {
        let pages: Vec<u32> = vec![5, 0, 3, 4, 7, 1, 2, 6];
        let tokens = [0; 11];
        for window in [None, Some(6), Some(1)] {
            for of in [1, 2, 3, 5] {
                let mut seen = vec![0; 11];
                let mut written = vec![0; 11];
                for at in 0..of {
                    let held = HeldRows::of(&[part(14, &tokens, &pages)], (at, of), 4, &[window]);
                    assert_eq!(held.sizes.prefills, u32::from(of == 1));
                    held.written.iter().for_each(|&row| written[row as usize] += 1);
                    if of == 1 {
                        assert_eq!(held.rows.len(), 11);
                        continue;
                    }
                    assert_eq!(held.partial as usize, held.rows.len());
                    for (row, range) in held.rows.iter().zip(held.tables.ranges[0].chunks_exact(2)) {
                        seen[*row as usize] += range[1] - range[0];
                    }
                }
                assert_eq!(written, [1; 11]);
                if of > 1 {
                    let expected: Vec<u32> = (14..25).map(|at| visible_keys(at, window) as u32).collect();
                    assert_eq!(seen, expected, "{window:?} over {of}");
                }
            }
        }
    }
}
