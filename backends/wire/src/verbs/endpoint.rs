//! The active end of an RDMA connection.

use super::device::VerbsNic;
use super::offer::{AcceptedRail, ConnectReply, QueuePairAddress};
use super::queue::{Channel, Completions, QueuePair, QueuePairRoute, VerbsRegistration, WorkRequest};
use super::{Local, VerbsOptions, status};
use crate::one_sided::{Batches, Carrier, Direction, OneSided, Reach};
use crate::stream::SecureStream;
use ibverbs_sys::{ibv_access_flags, ibv_wr_opcode as opcode};
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::transport::{Piece, TransferId};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

/// Number of work requests in a chain, which reports one completion.
const CHAIN: usize = 32;

/// The active end of an open RDMA connection.
pub type VerbsEndpoint = OneSided<RdmaCarrier>;

/// The queue pairs of a connection.
pub struct RdmaCarrier {
    // dropped in this order: the NIC stops before the memory is released
    rails: Vec<Rail>,
    control: Option<SecureStream>,
    local: Arc<Local>,
    remote_address: u64,
    reach: Reach,
    slice_bytes: u64,
    spin: Duration,
    /// Index of the queue pair that takes the next slice.
    turn: usize,
    /// Notice to the peer once the next batch has landed.
    notice: Option<u32>,
}

/// The part of a connection that uses one NIC.
struct Rail {
    nic: Arc<VerbsNic>,
    lanes: Vec<QueuePairLane>,
    channel: Arc<Channel>,
    local: Arc<VerbsRegistration>,
    remote_key: u32,
    /// Device, kind of address and MTU, for display.
    details: String,
}

/// One queue pair with its pending work.
struct QueuePairLane {
    queue_pair: QueuePair,
    waiting: VecDeque<(u64, WorkRequest)>,
    /// Chains in flight, in order: the batch and the number of requests.
    flying: VecDeque<(u64, usize)>,
    in_flight: usize,
    depth: usize,
}

/// Queue pairs of one NIC that are not yet connected.
pub(crate) struct HalfRail {
    nic: Arc<VerbsNic>,
    channel: Arc<Channel>,
    local: Arc<VerbsRegistration>,
    queue_pairs: Vec<QueuePair>,
    depth: u32,
}

impl HalfRail {
    pub(crate) fn new(
        nic: &Arc<VerbsNic>,
        local: Arc<VerbsRegistration>,
        count: usize,
        depth: u32,
    ) -> Result<Self> {
        let channel = Arc::new(Channel::new(nic)?);
        let one = || {
            // flushing a broken queue pair reports every request
            let completions = Arc::new(Completions::new(nic, channel.clone(), depth + 1)?);
            QueuePair::new(nic, completions, depth, 1, ibv_access_flags(0))
        };
        let queue_pairs = (0..count).map(|_| one()).collect::<Result<_>>()?;
        Ok(HalfRail { nic: nic.clone(), channel, local, queue_pairs, depth })
    }

    pub(crate) fn queues(&self) -> Vec<QueuePairAddress> {
        self.queue_pairs.iter().map(QueuePair::here).collect()
    }

    fn join(self, answer: &AcceptedRail) -> Result<Rail> {
        let HalfRail { nic, channel, local, queue_pairs, depth } = self;
        let path = &answer.path;
        let route = QueuePairRoute {
            ours: path.active,
            theirs: path.owner,
            lid: answer.lid,
            mtu_bytes: path.mtu_bytes.min(nic.port.mtu_bytes),
            reads: path.reads.min(nic.port.reads_out),
        };
        if answer.queues.len() != queue_pairs.len() {
            let (ours, theirs) = (queue_pairs.len(), answer.queues.len());
            return Err(Error::invalid(format!("{ours} queue pairs were offered, {theirs} answered")));
        }
        let join = |(queue_pair, there): (QueuePair, &QueuePairAddress)| {
            queue_pair.join(*there, &route)?;
            let (waiting, flying) = (VecDeque::new(), VecDeque::new());
            Ok(QueuePairLane { queue_pair, waiting, flying, in_flight: 0, depth: depth as usize })
        };
        let lanes = queue_pairs.into_iter().zip(&answer.queues).map(join).collect::<Result<_>>()?;
        let details = format!("{} by {}, MTU {}", nic.name, path.active.kind, route.mtu_bytes);
        Ok(Rail { nic, lanes, channel, local, remote_key: answer.remote_key, details })
    }
}

impl QueuePairLane {
    /// Posts pending work as far as there is room.
    fn pump(&mut self, local_key: u32, remote_key: u32) -> Result<()> {
        while self.in_flight < self.depth {
            let Some(&(batch, _)) = self.waiting.front() else { return Ok(()) };
            let room = CHAIN.min(self.depth - self.in_flight);
            let of_batch = self.waiting.iter().take(room).take_while(|(other, _)| *other == batch).count();
            let chain: Vec<WorkRequest> =
                self.waiting.drain(..of_batch).map(|(_, request)| request).collect();
            self.queue_pair.post(&chain, batch, local_key, remote_key)?;
            self.in_flight += of_batch;
            self.flying.push_back((batch, of_batch));
            self.assert_depth();
        }
        Ok(())
    }

    /// Asserts that the posted work fits into the queue pair and is completed in the end.
    fn assert_depth(&self) {
        let Self { in_flight, depth, flying, .. } = self;
        debug_assert!(in_flight <= depth, "{in_flight} requests in a queue pair of depth {depth}");
        debug_assert_eq!(*in_flight, flying.iter().map(|(_, count)| count).sum::<usize>());
    }
}

impl RdmaCarrier {
    pub(crate) fn join(
        halves: Vec<HalfRail>,
        local: Arc<Local>,
        answer: &ConnectReply,
        options: &VerbsOptions,
    ) -> Result<VerbsEndpoint> {
        if answer.address.checked_add(answer.bytes).is_none() {
            return Err(Error::invalid("the peer answered with a region beyond the end of memory"));
        }
        let mut halves: Vec<Option<HalfRail>> = halves.into_iter().map(Some).collect();
        let mut rails = Vec::new();
        for rail in &answer.rails {
            let half = halves.get_mut(rail.offered).and_then(Option::take);
            let half =
                half.ok_or_else(|| Error::invalid("the peer answered to a rail that was not offered"))?;
            rails.push(half.join(rail)?);
        }
        if rails.is_empty() {
            return Err(Error::invalid("the peer answered without any rail"));
        }
        let reach =
            Reach { local_bytes: local.place.bytes(), remote_bytes: answer.bytes, access: answer.access };
        Ok(OneSided::new(RdmaCarrier {
            rails,
            control: None,
            local,
            remote_address: answer.address,
            reach,
            slice_bytes: u64::from(options.slice_bytes),
            spin: options.spin,
            turn: 0,
            notice: None,
        }))
    }

    /// Attaches the control connection, which ends when the peer closes.
    pub(crate) fn watch(&mut self, control: SecureStream) -> Result<()> {
        let other = |error| Error::new(ErrorKind::Other, format!("control connection: {error}"));
        control.socket().set_nonblocking(true).map_err(other)?;
        self.control = Some(control);
        Ok(())
    }

    /// Returns the next queue pair in turn, alternating between rails first.
    fn lane(&mut self) -> &mut QueuePairLane {
        let rails = self.rails.len();
        let rail = &mut self.rails[self.turn % rails];
        let lanes = rail.lanes.len();
        &mut rail.lanes[self.turn / rails % lanes]
    }

    /// Notes completions, and returns whether there were any.
    fn collect(&mut self, batches: &mut Batches) -> Result<bool> {
        let (mut any, mut broken) = (false, None);
        for rail in &mut self.rails {
            for lane in &mut rail.lanes {
                let completions = lane.queue_pair.completions.clone();
                any |= completions.poll(|completion| match completion.error() {
                    None => {
                        let Some((batch, count)) = lane.flying.pop_front() else { return };
                        lane.in_flight -= count;
                        batches.landed(batch, count as u64);
                    }
                    // the first failure is the cause; the others are flushed behind it
                    Some((code, vendor)) => {
                        broken.get_or_insert_with(|| status::explain(&rail.nic.name, code, vendor));
                    }
                })?;
            }
        }
        broken.map_or(Ok(any), Err)
    }

    /// Posts pending work.
    fn pump(&mut self) -> Result<()> {
        for rail in &mut self.rails {
            let (local_key, remote_key) = (rail.local.local_key(), rail.remote_key);
            rail.lanes.iter_mut().try_for_each(|lane| lane.pump(local_key, remote_key))?;
        }
        Ok(())
    }
}

impl VerbsEndpoint {
    /// Writes all pieces and then delivers `notice` to the peer, which sees it after they have landed. One
    /// queue pair carries the whole batch, since order holds only within a queue pair; batches alternate
    /// between them.
    ///
    /// # Errors
    /// As for [`Endpoint::write`](mixfleet_hal::transport::Endpoint::write). A peer that leaves 64 notices of
    /// a queue pair unread breaks the connection.
    pub fn write_with_immediate(&mut self, pieces: &[Piece], notice: u32) -> Result<TransferId> {
        if !self.carrier.reach.access.may_write() {
            return Err(Error::invalid("the peer's region is only for reading"));
        }
        self.carrier.notice = Some(notice);
        let begun = self.start(pieces, Direction::Write);
        self.carrier.notice = None;
        begun
    }
}

impl Carrier for RdmaCarrier {
    fn reach(&self) -> Reach {
        self.reach
    }

    fn check_peer(&mut self) -> Result<()> {
        let Some(control) = &mut self.control else { return Ok(()) };
        match control.read(&mut [0]) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(()),
            _ => {
                let detail = "the peer closed the connection: it ended, or deregistered the region";
                Err(Error::new(ErrorKind::Closed, detail))
            }
        }
    }

    fn begin(&mut self, batch: u64, pieces: &[Piece], direction: Direction) -> Result<u64> {
        let opcode = match direction {
            Direction::Write => opcode::IBV_WR_RDMA_WRITE,
            Direction::Read => opcode::IBV_WR_RDMA_READ,
        };
        let (here, there) = (self.local.place.address(0, 0)? as u64, self.remote_address);
        let notice = self.notice.take();
        let mut count = 0;
        for piece in pieces {
            for at in (0..piece.bytes).step_by(to_usize(self.slice_bytes)) {
                let bytes = to_u32(self.slice_bytes.min(piece.bytes - at));
                let (local, remote) = (here + piece.local + at, there + piece.remote + at);
                let request = WorkRequest { opcode, local, remote, bytes, immediate: 0 };
                self.lane().waiting.push_back((batch, request));
                count += 1;
                self.turn += usize::from(notice.is_none());
            }
        }
        if let Some(immediate) = notice {
            let opcode = opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            let request = WorkRequest { opcode, local: here, remote: there, bytes: 0, immediate };
            self.lane().waiting.push_back((batch, request));
            count += 1;
            self.turn += 1;
        }
        self.pump()?;
        Ok(count)
    }

    /// Collects completions and posts pending work.
    fn progress(&mut self, batches: &mut Batches) -> Result<()> {
        self.collect(batches)?;
        self.pump()
    }

    /// Polls for a while, then sleeps until something completes or the peer closes the connection.
    fn pause(&mut self, batches: &mut Batches, waited: Duration, longest: Duration) -> Result<()> {
        use std::os::fd::AsRawFd;
        if waited < self.spin {
            std::hint::spin_loop();
            return Ok(());
        }
        for lane in self.rails.iter().flat_map(|rail| &rail.lanes) {
            lane.queue_pair.completions.arm()?;
        }
        if self.collect(batches)? {
            return self.pump();
        }
        let channels = self.rails.iter().map(|rail| rail.channel.fd());
        let control = self.control.as_ref().map(|control| control.socket().as_raw_fd());
        let fds = channels.chain(control).collect::<Vec<_>>();
        super::wait_readable(&fds, longest);
        for rail in &self.rails {
            rail.channel.drain();
        }
        Ok(())
    }

    fn discard(&mut self, batch: u64) {
        for lane in self.rails.iter_mut().flat_map(|rail| &mut rail.lanes) {
            lane.waiting.retain(|(of, _)| *of != batch);
        }
    }

    fn details(&self) -> String {
        let rails: Vec<&str> = self.rails.iter().map(|rail| rail.details.as_str()).collect();
        rails.join("; ")
    }
}
