//! The passive end: registered regions, and the queue pairs through which peers access them.

use super::device::VerbsNic;
use super::offer::{AcceptedRail, ConnectReply, ConnectRequest, Path, QueuePairAddress, VERSION};
use super::queue::{Channel, Completions, QueuePair, QueuePairRoute, VerbsRegistration};
use crate::key::RegionKey;
use crate::pinned::PinnedRange;
use crate::regions::{FencedRegion, RegionTable, not_registered};
use ibverbs_sys::{ibv_access_flags as access_flags, ibv_wc_opcode, ibv_wc_status};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::RemoteAccess;
use mixfleet_hal::{Error, Result};
use std::collections::{BTreeMap, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of unread notices that a queue pair buffers.
const NOTICES: u32 = 64;
/// Maximum number of queue pairs that a request may ask for on one rail.
const QUEUES_MAX: usize = 64;

/// All regions of a transport.
pub(crate) struct VerbsOwner {
    pub(crate) nics: Vec<Arc<VerbsNic>>,
    pub(crate) regions: RegionTable<VerbsRegion>,
    next_way: AtomicU64,
}

/// A registered region. Fields drop in order: no key outlives the memory.
pub(crate) struct VerbsRegion {
    open: Mutex<OpenRegion>,
    access: RemoteAccess,
    address: u64,
    bytes: u64,
    memory: Arc<dyn SharedMemory>,
}

/// What peers reach. Fields drop in order: no queue pair outlives the keys.
struct OpenRegion {
    ways: BTreeMap<u64, PeerConnection>,
    /// Empty once the region has ended.
    registrations: Vec<VerbsRegistration>,
    inbox: Vec<Arc<Channel>>,
    unread: VecDeque<u32>,
    /// How the region ended, once it has.
    ended: Option<Result<()>>,
}

/// A peer's connection to a region.
struct PeerConnection {
    queue_pairs: Vec<QueuePair>,
    /// Closed together with the queue pairs, so that the peer notices at once.
    control: Option<TcpStream>,
}

impl Drop for PeerConnection {
    fn drop(&mut self) {
        if let Some(control) = &self.control {
            // the peer may have closed it already
            let _ = control.shutdown(Shutdown::Both);
        }
    }
}

impl VerbsRegion {
    fn lock(&self) -> MutexGuard<'_, OpenRegion> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FencedRegion for VerbsRegion {
    fn is_of(&self, memory: &Arc<dyn SharedMemory>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.memory), Arc::as_ptr(memory))
    }

    /// Ends all connections, then the keys.
    fn fence(&self) -> Result<()> {
        let mut open = self.lock();
        if let Some(outcome) = &open.ended {
            return outcome.clone();
        }
        open.ways.clear();
        let outcome =
            std::mem::take(&mut open.registrations).into_iter().try_for_each(VerbsRegistration::end);
        open.ended = Some(outcome.clone());
        outcome
    }
}

fn flags(access: RemoteAccess) -> access_flags {
    let may = |allowed, flag| if allowed { flag } else { access_flags(0) };
    may(access.may_write(), access_flags::IBV_ACCESS_REMOTE_WRITE)
        | may(access.may_read(), access_flags::IBV_ACCESS_REMOTE_READ)
}

impl VerbsOwner {
    pub(crate) fn new(nics: Vec<Arc<VerbsNic>>) -> Self {
        VerbsOwner { nics, regions: RegionTable::default(), next_way: AtomicU64::new(0) }
    }

    /// Registers `memory` on all NICs and returns its key and epoch. Memory that is already registered gets
    /// new ones, after the old ones have ended.
    pub(crate) fn register(
        &self,
        memory: Arc<dyn SharedMemory>,
        access: RemoteAccess,
    ) -> Result<(RegionKey, u64)> {
        let place = Arc::new(PinnedRange::new(memory.clone())?);
        self.regions.add(&memory, || {
            let on = |nic: &Arc<VerbsNic>| VerbsRegistration::new(nic, &place, flags(access));
            let registrations = self.nics.iter().map(on).collect::<Result<_>>()?;
            let inbox = self.nics.iter().map(|nic| Channel::new(nic).map(Arc::new)).collect::<Result<_>>()?;
            let (ways, unread) = Default::default();
            Ok(VerbsRegion {
                open: Mutex::new(OpenRegion { ways, registrations, inbox, unread, ended: None }),
                access,
                address: place.address(0, 0)? as u64,
                bytes: place.bytes(),
                memory: memory.clone(),
            })
        })
    }

    /// Creates the owner's ends for a peer's request. The connection ends with `close`, or with the region.
    pub(crate) fn accept(
        &self,
        offer: &ConnectRequest,
        control: Option<TcpStream>,
    ) -> Result<(ConnectReply, u64)> {
        if offer.version != VERSION {
            let theirs = offer.version;
            return Err(Error::unsupported(format!(
                "the peer speaks version {theirs} of the RDMA offer, this end {VERSION}; run the same release on both"
            )));
        }
        let key = RegionKey::from_hex(&offer.key).ok_or_else(|| not_registered(offer.epoch))?;
        let region = self.regions.find(key, offer.epoch)?;
        let mut open = region.lock();
        if open.ended.is_some() {
            return Err(not_registered(offer.epoch));
        }
        let mut way = PeerConnection { queue_pairs: Vec::new(), control };
        let mut rails = Vec::new();
        let mut free = offer.rails.iter().enumerate().collect::<VecDeque<_>>();
        for (i, nic) in self.nics.iter().enumerate() {
            // each of the peer's NICs once, pairing the nearest ones of both ends
            let fits = |(at, &(_, rail)): (usize, &(usize, &super::offer::RequestedRail))| {
                Some((at, Path::between(&rail.port, &nic.port)?))
            };
            let Some((at, path)) = free.iter().enumerate().find_map(fits) else { continue };
            let Some((offered, rail)) = free.remove(at) else { continue };
            let route = QueuePairRoute {
                ours: path.owner,
                theirs: path.active,
                lid: rail.port.lid,
                mtu_bytes: path.mtu_bytes,
                reads: path.reads,
            };
            let made = join(nic, &open.inbox[i], &rail.queues, &route, flags(region.access))?;
            let queues = made.iter().map(QueuePair::here).collect();
            way.queue_pairs.extend(made);
            let remote_key = open.registrations[i].remote_key();
            rails.push(AcceptedRail { offered, path, lid: nic.port.lid, queues, remote_key });
        }
        if rails.is_empty() {
            return Err(Error::unsupported(
                "the ends share no kind of RDMA address (RoCE v2 over IPv4 or IPv6, RoCE v1, InfiniBand)",
            ));
        }
        let id = self.next_way.fetch_add(1, Ordering::Relaxed);
        open.ways.insert(id, way);
        let VerbsRegion { address, bytes, access, .. } = *region;
        Ok((ConnectReply { address, bytes, access, rails }, id))
    }

    /// Ends a connection, unless its region has ended it already.
    pub(crate) fn close(&self, way: u64) {
        for region in self.regions.all() {
            region.lock().ways.remove(&way);
        }
    }

    /// Returns the next notice for a region, if one has arrived.
    pub(crate) fn notice(&self, key: RegionKey, epoch: u64) -> Result<Option<u32>> {
        let region = self.regions.find(key, epoch)?;
        let mut open = region.lock();
        let OpenRegion { ways, unread, .. } = &mut *open;
        for queue_pair in ways.values().flat_map(|way| &way.queue_pairs) {
            let mut came = 0;
            queue_pair.completions.poll(|completion| {
                let with_immediate = completion.opcode() == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
                let whole = completion.error().map_or(ibv_wc_status::IBV_WC_SUCCESS, |(status, _)| status);
                // receives that were pending when the peer's end broke complete with an error and are no
                // notices
                if whole == ibv_wc_status::IBV_WC_SUCCESS && with_immediate {
                    unread.push_back(u32::from_be(completion.imm_data));
                    came += 1;
                }
            })?;
            for _ in 0..came {
                queue_pair.expect_notice()?;
            }
        }
        Ok(unread.pop_front())
    }

    /// Arms the completion queues for the next notice, and returns the descriptors to wait for with what
    /// keeps them open.
    pub(crate) fn arm(&self, key: RegionKey, epoch: u64) -> Result<(Vec<Arc<Channel>>, Vec<RawFd>)> {
        let region = self.regions.find(key, epoch)?;
        let open = region.lock();
        for queue_pair in open.ways.values().flat_map(|way| &way.queue_pairs) {
            queue_pair.completions.arm()?;
        }
        let fds = open.inbox.iter().map(|channel| channel.fd()).collect();
        Ok((open.inbox.clone(), fds))
    }
}

/// Creates and connects the counterparts of `theirs`. Each has its own completion queue, so that one peer
/// cannot fill another's.
fn join(
    nic: &Arc<VerbsNic>,
    inbox: &Arc<Channel>,
    theirs: &[QueuePairAddress],
    route: &QueuePairRoute,
    remote: access_flags,
) -> Result<Vec<QueuePair>> {
    if theirs.is_empty() || theirs.len() > QUEUES_MAX {
        let many = theirs.len();
        return Err(Error::invalid(format!(
            "an offer of {many} queue pairs on a rail; 1 to {QUEUES_MAX} are taken"
        )));
    }
    let one = |there: &QueuePairAddress| {
        let completions = Arc::new(Completions::new(nic, inbox.clone(), NOTICES + 1)?);
        let queue_pair = QueuePair::new(nic, completions, 1, NOTICES, remote)?;
        for _ in 0..NOTICES {
            queue_pair.expect_notice()?;
        }
        queue_pair.join(*there, route)?;
        Ok(queue_pair)
    };
    theirs.iter().map(one).collect()
}
