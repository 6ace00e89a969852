//! Blocks that come from another instance for requests to come.

use super::{Engine, Outcome};
use mixfleet_scheduler::kv::{BlockHash, Tier};

impl Engine {
    /// The last `copied` blocks of `chain` have arrived. They are held if what comes before them still is and if they fit beside what is in use;
    /// whether they are.
    pub(in crate::simulate) fn take_copy(
        &mut self,
        chain: &[BlockHash],
        copied: usize,
        outcomes: &mut Vec<Outcome>,
    ) -> bool {
        let known = self.cache.pin(chain);
        let fits = (chain.len() - known) as u64 <= self.available();
        let joins = known + copied >= chain.len();
        if joins && fits {
            self.fit();
            self.cache.insert(chain, &mut self.evicted);
        }
        self.cache.unpin(&chain[..known]);
        self.tell_evicted(outcomes);
        if joins && fits && known < chain.len() {
            outcomes.push(Outcome::Stored(Tier::Device, chain[known..].to_vec()));
        }
        joins && fits
    }
}

#[cfg(test)]
mod tests {
    use super::super::Job;
    use super::*;
    use crate::fleet_file::FleetFile;
    use crate::simulate::{Choices, Setup};
    use std::path::Path;

    /// An instance of 8 blocks.
    fn engine() -> Engine {
        let text = r#"
version = 1
[model]
layers = 2
kv_bytes_per_token = 1000
[[pool]]
name = "one"
cache_tokens = 4096
calibration = { prefill_s = { overhead = 0.0, per_token = 1e-3, per_token_squared = 0.0 }, decode_s = { base = 1e-3, per_sequence = 0.0, per_kv_token = 0.0 } }
"#;
        let file = FleetFile::parse(text, Path::new(""), &|_| Err("there is none".into())).unwrap();
        let setup = Setup::new(&file, Choices::default());
        Engine::new(&setup.instances[0], &setup)
    }

    fn chain(document: u64, blocks: u64) -> Vec<BlockHash> {
        (0..blocks).map(|block| BlockHash(document << 32 | block)).collect()
    }

    /// What is told as stored and as evicted.
    fn told(outcomes: Vec<Outcome>) -> (Vec<BlockHash>, Vec<BlockHash>) {
        let (mut stored, mut evicted) = (Vec::new(), Vec::new());
        for outcome in outcomes {
            match outcome {
                Outcome::Stored(Tier::Device, hashes) => stored.extend(hashes),
                Outcome::Evicted(Tier::Device, hashes) => evicted.extend(hashes),
                _ => panic!("something else"),
            }
        }
        (stored, evicted)
    }

    #[test]
    fn a_copy_takes_the_place_of_what_nobody_uses() {
        let (mut engine, mut outcomes) = (engine(), Vec::new());
        assert!(engine.take_copy(&chain(1, 6), 6, &mut outcomes));
        assert_eq!(told(std::mem::take(&mut outcomes)), (chain(1, 6), Vec::new()));
        // the deepest blocks of the old one go
        assert!(engine.take_copy(&chain(2, 5), 5, &mut outcomes));
        let (stored, mut evicted) = told(std::mem::take(&mut outcomes));
        evicted.sort();
        assert_eq!((stored, evicted), (chain(2, 5), chain(1, 6)[3..].to_vec()));
        // the rest of one whose beginning is here; and one whose beginning is gone
        assert!(engine.take_copy(&chain(1, 5), 2, &mut outcomes));
        assert_eq!(told(std::mem::take(&mut outcomes)).0, chain(1, 5)[3..].to_vec());
        assert!(!engine.take_copy(&chain(3, 4), 2, &mut outcomes));
        assert!(outcomes.is_empty());
    }

    #[test]
    fn a_copy_without_room_beside_what_is_in_use_is_dropped() {
        let (mut engine, mut outcomes) = (engine(), Vec::new());
        let job = Job {
            request: 1,
            prompt_tokens: 5 * 512,
            output_tokens: 10,
            chain: chain(1, 5),
            pulled_tokens: 0,
            ready_at_s: 0.0,
            stays: true,
            due_s: 0.0,
            gives_way: false,
        };
        engine.enqueue(0.0, job);
        assert!(engine.turn(0.0, &mut outcomes).is_some());
        outcomes.clear();
        assert!(!engine.take_copy(&chain(2, 4), 4, &mut outcomes));
        assert!(outcomes.is_empty(), "nothing is stored or given up for it");
        assert!(engine.take_copy(&chain(3, 3), 3, &mut outcomes));
        assert_eq!(told(outcomes), (chain(3, 3), Vec::new()));
    }
}
