//! A digest of everything that determines a model's KV: its configuration and every byte of its weights.
//!
//! Tensors are divided into pieces that are hashed independently, so that any number of threads can share the
//! work without affecting the result. The distribution of tensors over files does not affect it either.

use super::config::ModelConfig;
use super::error::Result;
use super::load::Checkpoint;
use super::made::MadePart;
use mixfleet_hal::memory::FileStamp;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use twox_hash::XxHash3_128;

/// Bytes that are hashed as one piece, in about 0.3 ms of one core.
const PIECE_BYTES: usize = 4 << 20;

/// A digest that is being computed.
pub struct Digesting<'a> {
    checkpoint: &'a Checkpoint,
    pieces: Vec<Piece<'a>>,
    next: AtomicUsize,
}

struct Piece<'a> {
    bytes: &'a [u8],
    digest: OnceLock<u128>,
    /// The shard and the range, if a reordered copy is used.
    copied: Option<(usize, Range<usize>)>,
}

impl Checkpoint {
    /// Checks that the files are unchanged since they were mapped.
    ///
    /// # Errors
    /// Names a file that changed.
    pub fn check(&self) -> Result<()> {
        self.shards.iter().try_for_each(|shard| shard.check()).map_err(Into::into)
    }

    /// The files of the weights, and when each last changed; none where some are not in files.
    pub fn stamps(&self) -> Option<Vec<FileStamp>> {
        self.shards.iter().map(|shard| shard.stamp()).collect()
    }

    /// Accepts files with these stamps as unchanged, since all bytes were verified.
    pub fn accept(&self, stamps: &[FileStamp]) {
        self.shards.iter().zip(stamps).for_each(|(shard, stamp)| shard.accept(stamp));
    }

    /// Digest of the configuration and of all tensors' names, dtypes and shapes: these determine the model's
    /// speed, but not its output.
    pub fn shape_digest(&self) -> String {
        format!("{:032x}", self.shape().finish_128())
    }

    fn shape(&self) -> XxHash3_128 {
        let mut hash = XxHash3_128::new();
        add_config(&mut hash, &self.config);
        for (name, dtype, shape) in self.directory() {
            hash.write(format!("{name} {dtype} {shape:?};").as_bytes());
        }
        for (name, made) in &self.made {
            hash.write(format!("{name} {} {} {};", made.kind, made.rows, made.columns).as_bytes());
        }
        hash
    }

    /// Begins a digest of configuration and weights.
    pub fn digesting(&self) -> Digesting<'_> {
        let tensors = self.directory().into_iter().filter_map(|(name, ..)| self.bytes(name));
        let mut pieces: Vec<Piece<'_>> = tensors
            .flat_map(|tensor| tensor.chunks(PIECE_BYTES))
            .map(|bytes| Piece { bytes, digest: OnceLock::new(), copied: None })
            .collect();
        for made in self.made.values() {
            let mut parts: Vec<&MadePart> = made.parts.iter().collect();
            parts.dedup_by(|a, b| {
                let (a, b) = (a.source(), b.source());
                (a.shard, &a.range) == (b.shard, &b.range)
            });
            for part in parts {
                let (source, copied) = (part.source(), matches!(part, MadePart::Made(..)));
                let chunks = source.bytes(&self.shards).chunks(PIECE_BYTES).enumerate();
                pieces.extend(chunks.map(|(at, bytes)| {
                    let start = source.range.start + at * PIECE_BYTES;
                    let copied = copied.then(|| (source.shard, start..start + bytes.len()));
                    Piece { bytes, digest: OnceLock::new(), copied }
                }));
            }
        }
        Digesting { checkpoint: self, pieces, next: AtomicUsize::new(0) }
    }
}

fn add_config(hash: &mut XxHash3_128, config: &ModelConfig) {
    hash.write(format!("{config:?}").as_bytes());
}

impl Digesting<'_> {
    /// Hashes pieces until none is left; any number of threads may call it. `done` gets the bytes of each
    /// finished piece.
    pub fn work(&self, done: &dyn Fn(u64)) {
        while let Some(piece) = self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let _ = piece.digest.set(XxHash3_128::oneshot(piece.bytes));
            if let Some((shard, range)) = &piece.copied {
                self.checkpoint.shards[*shard].unneeded(range.clone());
            }
            done(piece.bytes.len() as u64);
        }
    }

    /// Returns the digest, once all threads are done; remaining pieces are hashed here.
    ///
    /// # Errors
    /// When a file was written to or truncated meanwhile, so that the digest would be meaningless.
    pub fn finish(self) -> Result<String> {
        let digest = self.value();
        self.checkpoint.check()?;
        Ok(digest)
    }

    /// Whether configuration and weights have this digest now, regardless of changes to the files since they
    /// were mapped.
    pub fn is(self, digest: &str) -> bool {
        self.value() == digest
    }

    fn value(&self) -> String {
        let mut hash = self.checkpoint.shape();
        for Piece { bytes, digest, .. } in &self.pieces {
            hash.write(&digest.get_or_init(|| XxHash3_128::oneshot(bytes)).to_le_bytes());
        }
        format!("{:032x}", hash.finish_128())
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::HostTensor;
    use super::super::testing::{ReadFiles, scratch};
    use super::super::variants::tiny_variants;
    use super::*;
    use mixfleet_hal::{Error, ErrorKind, FileMapper, HostMemory};
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    fn digest(checkpoint: &Checkpoint, threads: usize) -> String {
        let digesting = checkpoint.digesting();
        let hashed = AtomicU64::new(0);
        let count = |bytes| _ = hashed.fetch_add(bytes, Ordering::Relaxed);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| digesting.work(&count));
            }
        });
        assert!(threads == 0 || hashed.into_inner() == checkpoint.size_bytes());
        digesting.finish().expect("unchanged")
    }

    /// A model one of whose tensors has several pieces, the last one incomplete, with `change` applied to its
    /// tensors.
    fn large(change: impl FnOnce(&mut Vec<HostTensor>)) -> Checkpoint {
        let mut config = tiny_variants().remove(0).1.model_config().expect("good");
        config.vocab = 3 * PIECE_BYTES as u32 / (2 * config.hidden) + 1;
        let tensor = |(name, shape): (String, Vec<u64>)| {
            let elements = shape.iter().product::<u64>() as usize;
            let bytes = (0..elements * 4).map(|at| (at * 31 / 7 % 251) as u8).collect();
            HostTensor { name, dtype: mixfleet_hal::DType::F32, shape, bytes }
        };
        let mut tensors: Vec<HostTensor> =
            super::super::names::shapes(&config).into_iter().map(tensor).collect();
        change(&mut tensors);
        Checkpoint::from_parts(config, tensors).expect("whole")
    }

    #[test]
    fn a_digest_does_not_depend_on_how_many_threads_compute_it() {
        let checkpoint = large(|_| {});
        let alone = digest(&checkpoint, 0);
        for threads in [1, 2, 7] {
            assert_eq!(digest(&checkpoint, threads), alone);
        }
    }

    #[test]
    fn every_byte_of_a_tensor_counts() {
        let before = digest(&large(|_| {}), 2);
        let most = |tensors: &[HostTensor]| -> usize {
            (0..tensors.len()).max_by_key(|at| tensors[*at].bytes.len()).expect("some")
        };
        let bytes = large(|_| {}).size_bytes();
        assert!(bytes > 3 * PIECE_BYTES as u64);
        for at in [0, 64 << 10, (64 << 10) + 1, PIECE_BYTES - 1, PIECE_BYTES, usize::MAX] {
            let changed = large(|tensors| {
                let longest = most(tensors);
                let bytes = &mut tensors[longest].bytes;
                let at = at.min(bytes.len() - 1);
                bytes[at] ^= 1;
            });
            assert_ne!(digest(&changed, 2), before, "byte {at}");
            assert_eq!(changed.shape_digest(), large(|_| {}).shape_digest());
        }
    }

    #[test]
    fn the_configuration_counts() {
        let mut checkpoint = large(|_| {});
        let (before, shape) = (digest(&checkpoint, 1), checkpoint.shape_digest());
        checkpoint.config.norm_eps *= 2.0;
        assert_ne!(digest(&checkpoint, 1), before);
        assert_ne!(checkpoint.shape_digest(), shape);
    }

    #[test]
    fn how_tensors_are_spread_over_files_does_not_count() {
        let directory = scratch("digest-shards");
        let random = tiny_variants().remove(0).1;
        let digests = [1, 3].map(|shards| {
            let own = directory.join(shards.to_string());
            std::fs::create_dir_all(&own).expect("a directory");
            random.write(&own, shards).expect("a checkpoint");
            digest(&Checkpoint::open(&own, &ReadFiles).expect("good"), 1)
        });
        assert_eq!(digests[0], digests[1]);
    }

    #[derive(Debug)]
    struct Changes(Vec<u8>);

    impl HostMemory for Changes {
        fn as_bytes(&self) -> &[u8] {
            &self.0
        }

        fn check(&self) -> mixfleet_hal::Result<()> {
            Err(Error::new(ErrorKind::DeviceLost, "the file was written to since it was loaded"))
        }
    }

    struct MapChanging;

    impl FileMapper for MapChanging {
        fn map(&self, path: &Path) -> std::io::Result<Arc<dyn HostMemory>> {
            Ok(Arc::new(Changes(std::fs::read(path)?)))
        }
    }

    #[test]
    fn a_file_that_changes_while_it_is_hashed_has_no_digest() {
        let directory = scratch("digest-changing");
        tiny_variants().remove(0).1.write(&directory, 1).expect("a checkpoint");
        let checkpoint = Checkpoint::open(&directory, &MapChanging).expect("good");
        let digesting = checkpoint.digesting();
        digesting.work(&|_| {});
        let error = digesting.finish().expect_err("changed").to_string();
        assert!(error.contains("was written to"), "{error}");
    }
}
