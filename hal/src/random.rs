//! A counter-based random number generator. The value at (seed, index) needs no state, so a token stream can
//! continue on another machine, and a test failure is reproduced by its seed alone.

/// Returns 64 random bits: the SplitMix64 finaliser (Steele, Lea & Flood 2014) over a mixed (seed, index)
/// pair.
pub fn bits(seed: u64, index: u64) -> u64 {
    let mut z = seed ^ mix(index.wrapping_add(0x9E37_79B9_7F4A_7C15));
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mix(z)
}

/// Returns a uniform value in [0, 1) with 53 random bits.
pub fn unit(seed: u64, index: u64) -> f64 {
    (bits(seed, index) >> 11) as f64 / (1u64 << 53) as f64
}

/// Applies the SplitMix64 finaliser, a bijection that spreads any input, such as a small number, over all 64
/// bits.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A random stream over [`bits`], whose only state is the next index.
#[derive(Clone, Debug)]
pub struct Stream {
    seed: u64,
    index: u64,
}

impl Stream {
    /// Creates the stream of `seed`, at its start.
    pub fn new(seed: u64) -> Self {
        Stream { seed, index: 0 }
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.index += 1;
        bits(self.seed, self.index - 1)
    }

    /// Returns the next uniform value in [0, 1).
    pub fn next_unit(&mut self) -> f64 {
        self.index += 1;
        unit(self.seed, self.index - 1)
    }

    /// Returns the next uniform value in [0, bound).
    ///
    /// # Panics
    /// If `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "an empty range has no element");
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns the next standard normal value (Box-Muller).
    pub fn next_normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.next_unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.next_unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_depend_on_seed_and_index_and_spread_evenly() {
        assert_ne!(bits(1, 2), bits(2, 1));
        assert_eq!(bits(7, 9), bits(7, 9));
        let mean = (0..10_000).map(|i| unit(3, i)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let mut stream = Stream::new(5);
        assert!((0..1000).all(|_| stream.below(7) < 7));
        let squares = (0..10_000).map(|_| stream.next_normal().powi(2)).sum::<f64>() / 10_000.0;
        assert!((squares - 1.0).abs() < 0.05, "{squares}");
    }
}
