//! The requirements for every transport. `conformance!(name, make)` creates a module of tests for the
//! transports that `make` returns: the owner's and the user's, which may be two or the same one twice.

pub(crate) mod fencing;
pub(crate) mod landing;
pub(crate) mod model;
pub(crate) mod waiting;

use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::random;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, RemoteAccess, Transport};
use mixfleet_hal::{ErrorKind, Result};
use mixfleet_wire::HostRegion;
use std::sync::Arc;
use std::time::Duration;

/// Timeout for events that must happen; a machine that needs longer is stuck.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// The two ends of a connection.
pub(crate) struct Pair {
    pub(crate) owner: Arc<dyn Transport>,
    pub(crate) user: Arc<dyn Transport>,
}

impl Pair {
    /// Both ends are the same transport.
    pub(crate) fn one(transport: impl Transport + 'static) -> Self {
        let owner: Arc<dyn Transport> = Arc::new(transport);
        Pair { user: owner.clone(), owner }
    }

    fn share(&self, memory: &Arc<HostRegion>, access: RemoteAccess) -> Descriptor {
        self.owner.register(memory.clone(), access).unwrap()
    }

    fn way(&self, here: &Arc<HostRegion>, there: &Descriptor) -> Box<dyn Endpoint> {
        self.user.connect(here.clone(), there).unwrap()
    }

    fn refusal(&self, here: &Arc<HostRegion>, there: &Descriptor) -> ErrorKind {
        self.user.connect(here.clone(), there).err().expect("a way to a region that is not there").kind
    }
}

pub(crate) fn region(bytes: &[u8]) -> Arc<HostRegion> {
    let region = HostRegion::new(bytes.len()).unwrap();
    region.store(0, bytes).unwrap();
    Arc::new(region)
}

pub(crate) fn content(region: &HostRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.size_bytes() as usize];
    region.load(0, &mut bytes).unwrap();
    bytes
}

/// Returns bytes that differ wherever they are split.
pub(crate) fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8) as u64).flat_map(|at| random::bits(seed, at).to_le_bytes());
    words.take(bytes).collect()
}

pub(crate) fn piece(local: u64, remote: u64, bytes: u64) -> Piece {
    Piece { local, remote, bytes }
}

/// Writes and waits.
pub(crate) fn write(way: &mut dyn Endpoint, pieces: &[Piece]) -> Result<()> {
    let transfer = way.write(pieces)?;
    way.wait(transfer, LONG)
}

/// Reads and waits.
pub(crate) fn read(way: &mut dyn Endpoint, pieces: &[Piece]) -> Result<()> {
    let transfer = way.read(pieces)?;
    way.wait(transfer, LONG)
}

/// Generates one test per requirement.
#[macro_export]
macro_rules! conformance {
    ($name:ident, $make:expr) => {
        $crate::conformance!(@ $name, $make,
            landing: pieces_land_where_they_should_and_nowhere_else, reads_bring_what_is_there,
                long_pieces_and_ways_from_a_memory_to_itself_are_whole, nothing_is_a_batch_too,
                many_small_pieces_land, big_batches_land, one_piece_out_of_bounds_stops_all,
                a_region_is_reached_only_as_its_owner_said, two_ways_reach_one_region;
            waiting: a_transfer_ends_once, batches_are_waited_for_in_any_order,
                zero_time_only_asks, batches_move_while_the_user_does_something_else,
                a_way_that_is_dropped_in_the_middle_ends, a_batch_given_up_leaves_the_way_open;
            fencing: a_write_under_an_old_epoch_never_lands, after_deregistration_the_region_is_closed_and_freed,
                descriptors_of_others_are_refused, writers_on_many_threads_stop_at_the_fence,
                readers_see_nothing_new_after_the_fence, an_owner_that_is_gone_is_closed;
            model: random_batches_do_what_a_model_does);
    };
    (@ $name:ident, $make:expr, $($group:ident: $($test:ident),*);*) => {
        mod $name {
            $($(
                #[test]
                fn $test() {
                    $crate::conformance::$group::$test(&$make);
                }
            )*)*
        }
    };
}
