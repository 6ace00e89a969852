//! Chooses the knots of a table of times.

use super::tables::Grid;
use mixfleet_hal::cast::to_u32;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

/// Relative error of linear interpolation that needs no further knot.
const TOLERANCE: f64 = 2e-3;
/// Knots are at least this share of their position apart, so that noise adds only a limited number of knots.
const CLOSEST: u32 = 1024;

/// Knots from 1 to `most`, `per_octave` for each power of two (or every number, where those are fewer).
pub(super) fn geometric(most: u32, per_octave: u32) -> Vec<u32> {
    let octaves = (0..32u32).map(|power| 1u64 << power).take_while(|low| *low <= u64::from(most));
    let inside = octaves
        .flat_map(|low| (0..u64::from(per_octave)).map(move |i| low + low * i / u64::from(per_octave)));
    let mut knots: Vec<u32> = inside.filter(|knot| *knot < u64::from(most)).map(to_u32).collect();
    knots.push(most.max(1));
    knots.dedup();
    knots
}

/// A table of `time` from 1 to `most`: powers of two, and knots between them where linear interpolation is
/// too inaccurate.
pub(super) fn adaptive(most: u32, time: impl Fn(u32) -> f64) -> Grid {
    // the probes of an interval are nearly half of those of its halves
    let probed = RefCell::new(HashMap::new());
    let time = |at: u32| *probed.borrow_mut().entry(at).or_insert_with(|| time(at));
    let mut known: BTreeMap<u32, f64> =
        geometric(most, 1).into_iter().map(|knot| (knot, time(knot))).collect();
    let ends: Vec<u32> = known.keys().copied().collect();
    let mut open: Vec<(u32, u32)> = ends.windows(2).map(|pair| (pair[0], pair[1])).collect();
    while let Some((low, high)) = open.pop() {
        let width = high - low;
        if width <= (low / CLOSEST).max(1) {
            continue;
        }
        let (first, last) = (known[&low], known[&high]);
        let middle = low + width / 2;
        // Kernels work on tiles of rows, so their times jump just after round numbers.
        let probes = [low + 1, low + width / 4, middle, low + width / 4 * 3, high - 1];
        let straight = probes.into_iter().all(|at| {
            let line = first + (last - first) * f64::from(at - low) / f64::from(width);
            let truth = time(at);
            (line - truth).abs() <= TOLERANCE * truth
        });
        if !straight {
            known.insert(middle, time(middle));
            open.extend([(low, middle), (middle, high)]);
        }
    }
    let (axis, values) = known.into_iter().map(|(knot, value)| (f64::from(knot), value)).unzip();
    Grid::checked(vec![axis], values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knots_rise_from_one_to_the_end() {
        assert_eq!(geometric(12, 4), [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]);
        assert_eq!(geometric(1, 4), [1]);
        assert_eq!(geometric(1000, 1), [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]);
    }

    #[test]
    fn a_kink_between_powers_of_two_gets_its_knots() {
        let roof = |rows: u32| f64::from(rows).max(150.0);
        let grid = adaptive(4096, roof);
        for rows in 1..=4096 {
            let ratio = grid.at([f64::from(rows)]) / roof(rows);
            assert!((ratio - 1.0).abs() < 0.01, "{rows}: {ratio}");
        }
        assert!(grid.len() < 40, "{}", grid.len());
    }

    #[test]
    fn a_staircase_is_followed_where_it_jumps() {
        let stairs = |rows: u32| f64::from(rows.div_ceil(128));
        let grid = adaptive(2048, stairs);
        for rows in (1..=16).flat_map(|step| [128 * step, 128 * step - 1, 128 * step - 127]) {
            assert!((grid.at([f64::from(rows)]) - stairs(rows)).abs() < 0.01, "{rows}");
        }
    }
}
