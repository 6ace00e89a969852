//! Follows what an engine has cached: subscribes to its KV events, and has those replayed that were missed.
//!
//! Each rank has its own task, which never gives up. The events that it forwards are in order and without a
//! gap, or begin with a reset of the known content. A cut connection, a missing number and silence all lead
//! to the same request, for the events from the last one on: if that one comes again unchanged, the engine is
//! the same, and the following ones were missed.

use crate::kv_events::{EngineHash, KvEvent, KvEventBatch, StoredKv, split_frames};
use crate::kv_source::{EventsFrom, KvSource};
use crate::zmtp::{ZmqPeer, ZmqSocket, ZmtpMessage};
use mixfleet_hal::outside::{EngineBlock, EngineFuture, EngineKvChange, EngineKvFeed};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// Time for a connection and its greeting.
const MEET_MAX: Duration = Duration::from_secs(5);
/// Wait before a connection is tried again: at first, and at most.
const AGAIN_FIRST: Duration = Duration::from_millis(100);
const AGAIN_MAX: Duration = Duration::from_secs(5);
/// Silence after which it asks for missed events.
const SILENCE: Duration = Duration::from_secs(10);
/// Time in which a replay goes on. An engine looks for questions ten times a second.
const REPLAY_WAIT: Duration = Duration::from_secs(5);
/// Time without a connection after which the known content is too old.
const UNHEARD_MAX: Duration = Duration::from_secs(60);
/// Batches in flight to the follower.
const BATCHES_AHEAD: usize = 8;
/// The number of the end of a replay.
const END: u64 = u64::MAX;

/// The feed of an engine with one or more ranks.
pub(crate) struct KvFeed {
    changes: mpsc::Receiver<Vec<EngineKvChange>>,
    _ranks: JoinSet<()>,
}

impl KvFeed {
    /// Begins to follow. It is called within a tokio runtime.
    pub(crate) fn start(sources: Vec<KvSource>) -> Self {
        let (out, changes) = mpsc::channel(BATCHES_AHEAD);
        let mut ranks = JoinSet::new();
        for source in sources {
            ranks.spawn(Follower::new(source, out.clone()).run());
        }
        KvFeed { changes, _ranks: ranks }
    }
}

impl EngineKvFeed for KvFeed {
    fn next(&mut self) -> EngineFuture<'_, Vec<EngineKvChange>> {
        Box::pin(async {
            match self.changes.recv().await {
                Some(changes) => changes,
                // the tasks end only with the feed
                None => std::future::pending().await,
            }
        })
    }
}

/// The follower is gone.
struct Unwanted;

/// Why a connection is given up.
enum Stop {
    Unwanted,
    Broken(String),
}

impl From<Unwanted> for Stop {
    fn from(_: Unwanted) -> Self {
        Stop::Unwanted
    }
}

impl From<String> for Stop {
    fn from(cause: String) -> Self {
        Stop::Broken(cause)
    }
}

/// Follows one rank.
struct Follower {
    source: KvSource,
    out: mpsc::Sender<Vec<EngineKvChange>>,
    /// The address to which the engine connects, and new connections.
    listener: Option<TcpListener>,
    newcomer: Option<TcpStream>,
    /// The number that comes next; any one if nothing is known.
    next: Option<u64>,
    /// The last batch: its number and a digest.
    last: Option<(u64, u64)>,
    /// Whether something was sent on that may still hold.
    is_known: bool,
    /// Whether it was ever connected, or the follower has been told why not.
    is_told: bool,
}

impl Follower {
    fn new(source: KvSource, out: mpsc::Sender<Vec<EngineKvChange>>) -> Self {
        Follower {
            source,
            out,
            listener: None,
            newcomer: None,
            next: None,
            last: None,
            is_known: false,
            is_told: false,
        }
    }

    async fn run(mut self) {
        let (mut wait, mut heard) = (AGAIN_FIRST, Instant::now());
        loop {
            match self.follow(&mut wait, &mut heard).await {
                Err(Stop::Broken(cause)) => {
                    let is_old = self.is_known && heard.elapsed() > UNHEARD_MAX;
                    let is_news = !std::mem::replace(&mut self.is_told, true);
                    if (is_old || is_news) && self.forget(&cause).await.is_err() {
                        return;
                    }
                }
                Err(Stop::Unwanted) | Ok(()) => return,
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(AGAIN_MAX);
        }
    }

    /// Follows by one connection.
    async fn follow(&mut self, wait: &mut Duration, heard: &mut Instant) -> Result<(), Stop> {
        let stream = self.stream().await?;
        let mut peer = meet(stream, ZmqSocket::Sub).await?;
        // subscribes to all topics
        peer.send(&[&[1]]).await?;
        (*wait, *heard, self.is_told) = (AGAIN_FIRST, Instant::now(), true);
        if let Err(stop) = self.catch_up().await {
            self.forget(&cause_of(stop)?).await?;
        }
        loop {
            let received = tokio::select! {
                received = timeout(SILENCE, peer.receive()) => received,
                newcomer = accept(self.listener.as_ref()) => {
                    self.newcomer = Some(newcomer);
                    return Err("the engine opened another connection".to_owned().into());
                }
            };
            *heard = Instant::now();
            match received {
                Ok(message) => self.take(&message?).await?,
                Err(_) if self.source.replay.is_some() => match self.catch_up().await {
                    Ok(0) => {}
                    // The engine spoke, and it was not heard.
                    Ok(_) => return Err("it is silent".to_owned().into()),
                    Err(stop) => drop(cause_of(stop)?),
                },
                Err(_) => {}
            }
        }
    }

    /// A connection to the publisher, opened by either side.
    async fn stream(&mut self) -> Result<TcpStream, String> {
        let address = match &self.source.events {
            EventsFrom::Engine(address) => return connect(address).await,
            EventsFrom::HereOrEngine(address) => address,
        };
        if self.listener.is_none() {
            match TcpListener::bind(address).await {
                Ok(listener) => self.listener = Some(listener),
                Err(bind) => {
                    return connect(address)
                        .await
                        .map_err(|error| format!("{address} is no free address here ({bind}), and {error}"));
                }
            }
        }
        match self.newcomer.take() {
            Some(newcomer) => Ok(newcomer),
            None => timeout(UNHEARD_MAX, accept(self.listener.as_ref()))
                .await
                .map_err(|_| format!("it does not connect to {address}")),
        }
    }

    /// Takes a message that came by subscription.
    async fn take(&mut self, message: &ZmtpMessage) -> Result<(), Stop> {
        let frames: Vec<&[u8]> = message.iter().map(Vec::as_slice).collect();
        let (number, payload) = split_frames(&frames)?;
        if self.next.is_some_and(|next| number > next)
            && let Err(stop) = self.catch_up().await
        {
            drop(cause_of(stop)?);
        }
        match self.next {
            Some(next) if number < next => return Ok(()),
            Some(next) if number > next => {
                self.forget(&format!("events from {next} to {} were missed", number - 1)).await?;
            }
            _ => {}
        }
        Ok(self.apply(number, payload).await?)
    }

    /// Replays the missed events, and returns how many batches these were.
    async fn catch_up(&mut self) -> Result<u64, Stop> {
        let Some(address) = self.source.replay.clone() else {
            return Err("nothing is replayed there: only later changes of its cache are known"
                .to_owned()
                .into());
        };
        let mut peer = meet(connect(&address).await?, ZmqSocket::Dealer).await?;
        let mut caught = 0;
        loop {
            let (more, is_whole) = self.replay(&mut peer).await?;
            caught += more;
            if is_whole {
                return Ok(caught);
            }
            if more == 0 {
                return Err("its replay has holes".to_owned().into());
            }
        }
    }

    /// Asks once, and returns how many missed batches came, and whether these are all.
    async fn replay(&mut self, peer: &mut ZmqPeer) -> Result<(u64, bool), Stop> {
        let last = self.last;
        let from = last.map_or(self.next.unwrap_or(0), |(number, _)| number);
        peer.send(&[b"", &from.to_be_bytes()]).await?;
        let (mut caught, mut is_first, mut has_hole) = (0, true, false);
        // A restarted engine replays from its own beginning.
        let mut anew = last.is_some();
        loop {
            let Ok(message) = timeout(REPLAY_WAIT, peer.receive()).await else {
                if is_first {
                    return Err("it replays nothing".to_owned().into());
                }
                // A full queue drops messages there, and the last one may be among them.
                return Ok((caught, false));
            };
            let message = message?;
            let frames: Vec<&[u8]> = message.iter().map(Vec::as_slice).collect();
            let frames = if frames.len() == 4 { &frames[1..] } else { &frames[..] };
            let (number, payload) = split_frames(frames)?;
            if number == END {
                break;
            }
            if std::mem::take(&mut is_first) {
                if last == Some((number, digest(payload))) {
                    anew = false;
                    continue;
                }
                if last.is_some() && number > from {
                    anew = false;
                    self.forget(&format!("events from {from} to {} are no longer kept", number - 1)).await?;
                }
                if self.last.is_none() {
                    self.next = Some(number);
                }
            }
            if anew || self.next.is_some_and(|next| number < next) {
                continue;
            }
            has_hole |= self.next.is_some_and(|next| number > next);
            if !has_hole {
                self.apply(number, payload).await?;
                caught += 1;
            }
        }
        if anew {
            self.forget("the engine was restarted").await?;
            self.next = Some(0);
            return Ok((caught + 1, false));
        }
        if self.next.is_none() {
            self.next = Some(from);
        }
        Ok((caught, !has_hole))
    }

    /// Sends on what a batch says.
    async fn apply(&mut self, number: u64, payload: &[u8]) -> Result<(), Unwanted> {
        match KvEventBatch::decode(payload) {
            Ok(batch) => {
                let changes: Vec<EngineKvChange> =
                    batch.events.into_iter().filter_map(|event| change(self.source.rank, event)).collect();
                self.is_known = true;
                if !changes.is_empty() {
                    self.out.send(changes).await.map_err(|_| Unwanted)?;
                }
            }
            Err(cause) => self.forget(&format!("its events cannot be read: {cause}")).await?,
        }
        self.last = Some((number, digest(payload)));
        self.next = number.checked_add(1);
        Ok(())
    }

    /// Begins anew.
    async fn forget(&mut self, cause: &str) -> Result<(), Unwanted> {
        (self.next, self.last, self.is_known) = (None, None, false);
        let lost = EngineKvChange::Lost { part: self.source.rank, cause: cause.to_owned() };
        self.out.send(vec![lost]).await.map_err(|_| Unwanted)
    }
}

fn cause_of(stop: Stop) -> Result<String, Unwanted> {
    match stop {
        Stop::Broken(cause) => Ok(cause),
        Stop::Unwanted => Err(Unwanted),
    }
}

fn digest(payload: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    payload.hash(&mut hasher);
    hasher.finish()
}

async fn connect(address: &str) -> Result<TcpStream, String> {
    match timeout(MEET_MAX, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => Err(format!("{address} cannot be reached: {error}")),
        Err(_) => Err(format!("{address} cannot be reached within {} s", MEET_MAX.as_secs())),
    }
}

async fn meet(stream: TcpStream, socket: ZmqSocket) -> Result<ZmqPeer, String> {
    let late = |_| "it does not greet".to_owned();
    timeout(MEET_MAX, ZmqPeer::meet(stream, socket)).await.map_err(late)?
}

/// The next connection that comes; none ever without a listener.
async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else { return std::future::pending().await };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            // for instance while no file is left
            Err(_) => tokio::time::sleep(AGAIN_FIRST).await,
        }
    }
}

/// What an event says of blocks that hold nothing but tokens, on the device.
fn change(part: u32, event: KvEvent) -> Option<EngineKvChange> {
    let on_device = |medium: &Option<String>| medium.as_deref().is_none_or(|medium| medium == "GPU");
    match event {
        KvEvent::Stored(StoredKv {
            hashes,
            parent,
            mut token_ids,
            block_tokens,
            medium,
            lora,
            plain_blocks,
            group,
        }) => {
            let plain = plain_blocks.min(hashes.len());
            if lora.is_some() || plain == 0 || !on_device(&medium) {
                return None;
            }
            token_ids.truncate(plain * block_tokens as usize);
            let block = |hash: &EngineHash| named(hash, group);
            let blocks = hashes[..plain].iter().map(block).collect();
            Some(EngineKvChange::Stored {
                part,
                parent: parent.as_ref().map(block),
                blocks,
                tokens: token_ids,
                block_tokens,
            })
        }
        KvEvent::Removed { hashes, medium, group } if on_device(&medium) => Some(EngineKvChange::Removed {
            part,
            blocks: hashes.iter().map(|hash| named(hash, group)).collect(),
        }),
        KvEvent::Cleared => Some(EngineKvChange::Cleared { part }),
        KvEvent::Removed { .. } | KvEvent::Other(_) => None,
    }
}

/// The name of a block of a group of layers.
fn named(hash: &EngineHash, group: u32) -> EngineBlock {
    let bits = match hash {
        EngineHash::Number(bits) => *bits,
        // as engines shorten them themselves: the last 64 bits
        EngineHash::Bytes(bytes) => {
            bytes.iter().rev().take(8).rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
        }
    };
    // an odd factor keeps names of one group apart, and leaves those of group 0 unchanged
    EngineBlock(bits ^ u64::from(group).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(lora: Option<&str>, medium: Option<&str>, plain_blocks: usize) -> KvEvent {
        KvEvent::Stored(StoredKv {
            hashes: vec![EngineHash::Number(7), EngineHash::Number(8)],
            parent: Some(EngineHash::Number(6)),
            token_ids: vec![1, 2, 3, 4],
            block_tokens: 2,
            medium: medium.map(str::to_owned),
            lora: lora.map(str::to_owned),
            plain_blocks,
            group: 0,
        })
    }

    #[test]
    fn only_blocks_of_tokens_alone_on_the_device_count() {
        let expected = |blocks: usize| EngineKvChange::Stored {
            part: 3,
            parent: Some(EngineBlock(6)),
            blocks: [EngineBlock(7), EngineBlock(8)][..blocks].to_vec(),
            tokens: [1, 2, 3, 4][..2 * blocks].to_vec(),
            block_tokens: 2,
        };
        assert_eq!(change(3, stored(None, Some("GPU"), 2)), Some(expected(2)));
        assert_eq!(change(3, stored(None, None, 1)), Some(expected(1)));
        for nothing in [stored(None, None, 0), stored(Some("fr"), None, 2), stored(None, Some("CPU"), 2)] {
            assert_eq!(change(3, nothing), None);
        }
        let removed = |medium: Option<&str>| KvEvent::Removed {
            hashes: vec![EngineHash::Number(7)],
            medium: medium.map(str::to_owned),
            group: 0,
        };
        let gone = EngineKvChange::Removed { part: 3, blocks: vec![EngineBlock(7)] };
        assert_eq!(change(3, removed(Some("GPU"))), Some(gone));
        assert_eq!(change(3, removed(Some("STORAGE"))), None);
    }

    #[test]
    fn blocks_of_groups_of_layers_have_names_of_their_own() {
        let long = EngineHash::Bytes([9, 9, 0, 0, 0, 0, 0, 0, 1, 2].into());
        assert_eq!(named(&long, 0), EngineBlock(0x0102));
        assert_eq!(named(&EngineHash::Bytes([5].into()), 0), EngineBlock(5));
        let names: std::collections::BTreeSet<_> = (0..9).map(|group| named(&long, group)).collect();
        assert_eq!(names.len(), 9);
    }
}
