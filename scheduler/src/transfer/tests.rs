//! The machine under a driver that plays clients, instances and the messages between them, which arrive in
//! any order that their channels allow while instances, links and clients are lost.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

const INSTANCES: u32 = 4;
const ANSWER: u32 = 4;
/// Copies have other ids than requests.
const COPY: u64 = 1000;

/// A token is the request and its position in the answer.
type Token = (RequestId, u32);
/// A reservation is identified by the number of its placement.
type Act = Action<u32, Token>;
type Ev = Event<u32, Token>;

/// What an instance holds of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    /// A prompt; whether its prefix is still waited for.
    Prompt {
        hand_off: Option<InstanceId>,
        waits: bool,
        next: u32,
    },
    /// A computed prompt that its receiver has not taken over.
    HandedOff {
        to: InstanceId,
    },
    /// Room for a prompt that another instance computes.
    Room,
    /// A copy that has not arrived.
    Copying,
    Decoding {
        next: u32,
    },
}

#[derive(Clone, Copy, Debug)]
enum PeerWord {
    Prefix { request: RequestId, attempt: u32 },
    HandedOver { request: RequestId, attempt: u32, next: u32 },
    TakenOver { request: RequestId, attempt: u32 },
}

#[derive(Default)]
struct Client {
    tokens: u32,
    ends: u32,
    waits_for_place: bool,
}

#[derive(Default)]
struct World {
    machine: KvTransfers<Token>,
    /// Orders in flight, each with the tokens that its request had.
    orders: BTreeMap<InstanceId, VecDeque<(Act, u32)>>,
    reports: BTreeMap<InstanceId, VecDeque<Ev>>,
    words: BTreeMap<(InstanceId, InstanceId), VecDeque<PeerWord>>,
    held: BTreeMap<(InstanceId, RequestId), (u32, Work)>,
    /// Prefixes being sent, with their receivers.
    lent: BTreeMap<(InstanceId, RequestId), (u32, InstanceId)>,
    clients: BTreeMap<RequestId, Client>,
    copies: u64,
    copies_ended: u64,
    /// Every cancellation, with the placement that it ended.
    cancelled: BTreeSet<Reporter>,
    /// Delivered reports, some of which are repeated.
    past: Vec<Ev>,
    /// Requests that decode where their KV was sent: the fleet machine no longer tracks the sender.
    joined: BTreeSet<RequestId>,
    /// Placements that lost their place.
    losses: usize,
}

fn report(instance: InstanceId, request: RequestId, attempt: u32) -> Reporter {
    Reporter { instance, request, attempt }
}

/// The report's placement; none for reports without one.
fn reporter(event: &Ev) -> Option<Reporter> {
    match *event {
        Event::Reserved { by, .. }
        | Event::Admitted { by }
        | Event::Drawn { by, .. }
        | Event::Revoked { by } => Some(by),
        _ => None,
    }
}

impl World {
    fn tell(&mut self, event: Ev) {
        let attempts: BTreeMap<RequestId, u32> =
            self.clients.keys().map(|&request| (request, self.machine.attempt(request))).collect();
        let mut actions = Vec::new();
        self.machine.step(event, &mut actions);
        for action in actions {
            self.carry_out(action, &attempts);
        }
    }

    fn carry_out(&mut self, action: Act, attempts: &BTreeMap<RequestId, u32>) {
        let instance = match action {
            Action::Add { to, hand_off, .. } => {
                assert!(hand_off.is_none_or(|(_, room)| room == to.attempt), "room of another placement");
                to.instance
            }
            Action::Lend { to, room, .. } => {
                assert_eq!(room, to.attempt, "room of another placement");
                to.instance
            }
            Action::Reserve { to, .. } | Action::NotLent { to } | Action::Copy { to, .. } => to.instance,
            Action::Cancel { instance, request } => {
                let attempt = attempts.get(&request).copied().unwrap_or(0);
                let is_new = self.cancelled.insert(report(instance, request, attempt));
                assert!(is_new, "{request} is cancelled twice at {instance}");
                instance
            }
            Action::Token { by, token: (request, index) } => {
                let client = self.clients.get_mut(&by.request).expect("a client");
                assert_eq!((request, index), (by.request, client.tokens), "another token than the next one");
                assert_eq!(client.ends, 0, "a request that ended goes on");
                client.tokens += 1;
                if client.tokens == ANSWER {
                    client.ends += 1;
                    self.tell(Event::Finished { request, instance: by.instance, knows: true });
                }
                return;
            }
            Action::OutOfTurn { .. } => panic!("every instance draws the next token: {action:?}"),
            Action::Unplace { .. } => return,
            Action::PlaceAgain { request } => return self.lost(request),
            Action::CopyEnded { .. } => {
                self.copies_ended += 1;
                return;
            }
            Action::TransferDone { request, instance } => {
                let place = self.machine.place(request).expect("it has a place");
                assert!(place.decode == instance && place.is_split(), "nothing is sent there");
                assert!(self.machine.tokens(request) > 0, "its first token is not known");
                assert!(self.joined.insert(request), "{request} joins twice");
                return;
            }
            Action::Exposed { time } => return assert!(time.0 >= 0.0),
        };
        let request = match &action {
            Action::Add { to, .. } => to.request,
            _ => 0,
        };
        let tokens = self.clients.get(&request).map_or(0, |client| client.tokens);
        self.orders.entry(instance).or_default().push_back((action, tokens));
    }

    fn lost(&mut self, request: RequestId) {
        assert!(self.machine.place(request).is_none(), "it still has the place that it lost");
        let client = self.clients.get_mut(&request).expect("a client");
        client.waits_for_place = true;
        self.joined.remove(&request);
        self.losses += 1;
    }

    fn say(&mut self, instance: InstanceId, event: Ev) {
        self.reports.entry(instance).or_default().push_back(event);
    }

    fn word(&mut self, from: InstanceId, to: InstanceId, word: PeerWord) {
        self.words.entry((from, to)).or_default().push_back(word);
    }

    /// Whether an instance takes a job: an older placement of the request ends.
    fn takes(&mut self, to: Reporter, work: Work) -> bool {
        let place = (to.instance, to.request);
        let is_new = self.held.get(&place).is_none_or(|(attempt, _)| *attempt < to.attempt);
        assert!(is_new, "{to:?} is given twice");
        self.held.insert(place, (to.attempt, work));
        is_new
    }

    fn obey(&mut self, instance: InstanceId) -> bool {
        let Some((order, tokens)) = self.orders.get_mut(&instance).and_then(VecDeque::pop_front) else {
            return false;
        };
        match order {
            Action::Add { to, hand_off, pull } => {
                let hand_off = hand_off.map(|(receiver, _)| receiver);
                let waits = pull.is_some();
                self.takes(to, Work::Prompt { hand_off, waits, next: tokens });
                let told = Event::Reserved { by: to, room: to.attempt };
                self.say(instance, if waits { told } else { Event::Admitted { by: to } });
            }
            Action::Reserve { to, .. } => {
                self.takes(to, Work::Room);
                self.say(instance, Event::Reserved { by: to, room: to.attempt });
            }
            Action::Copy { to, .. } => {
                self.takes(to, Work::Copying);
                self.say(instance, Event::Reserved { by: to, room: to.attempt });
            }
            Action::Lend { to, receiver, .. } => {
                self.lent.insert((instance, to.request), (to.attempt, receiver));
            }
            Action::NotLent { to } => self.prefix_ends(to),
            Action::Cancel { request, .. } => {
                self.held.remove(&(instance, request));
                self.lent.remove(&(instance, request));
            }
            other => unreachable!("no order: {other:?}"),
        }
        true
    }

    /// A prefix came, or will not come.
    fn prefix_ends(&mut self, at: Reporter) {
        let Reporter { instance, request, attempt } = at;
        match self.held.get_mut(&(instance, request)) {
            Some((its, Work::Prompt { waits, .. })) if *its == attempt && *waits => {
                *waits = false;
                self.say(instance, Event::Admitted { by: at });
            }
            Some((_, Work::Copying)) => {
                self.held.remove(&(instance, request));
                self.say(instance, Event::Kept { request });
            }
            _ => {}
        }
    }

    fn hear(&mut self, from: InstanceId, to: InstanceId) -> bool {
        let Some(word) = self.words.get_mut(&(from, to)).and_then(VecDeque::pop_front) else { return false };
        match word {
            PeerWord::Prefix { request, attempt } => {
                self.assert_owned(report(to, request, attempt));
                self.prefix_ends(report(to, request, attempt));
            }
            PeerWord::HandedOver { request, attempt, next } => {
                if self.held.get(&(to, request)) != Some(&(attempt, Work::Room)) {
                    return true;
                }
                self.assert_owned(report(to, request, attempt));
                self.held.insert((to, request), (attempt, Work::Decoding { next }));
                self.say(to, Event::Joined { request, instance: to, at: Seconds::ZERO });
                self.word(to, from, PeerWord::TakenOver { request, attempt });
            }
            PeerWord::TakenOver { request, attempt } => {
                if self.held.get(&(to, request)) == Some(&(attempt, Work::HandedOff { to: from })) {
                    self.held.remove(&(to, request));
                }
            }
        }
        true
    }

    /// KV that is accepted belongs to the current placement, or its cancellation is in flight.
    fn assert_owned(&self, at: Reporter) {
        let Reporter { instance, request, attempt } = at;
        let is_held = self.held.get(&(instance, request)).is_some_and(|(its, _)| *its == attempt);
        let is_current = self.machine.is_current(at) || self.machine.copies.contains(request);
        let is_cancel =
            |(order, _): &(Act, u32)| matches!(order, Action::Cancel { request: its, .. } if *its == request);
        let is_ending = self.orders.get(&instance).is_some_and(|orders| orders.iter().any(is_cancel));
        let is_over = self.clients.get(&request).is_some_and(|client| client.ends > 0);
        assert!(!is_held || is_current || is_ending || is_over, "bytes land without an owner: {at:?}");
    }

    /// An instance does a part of its work; what a `choice` says may be to give a request up.
    fn work(&mut self, instance: InstanceId, choice: u16) -> bool {
        let lent: Vec<_> = self.lent.keys().filter(|(at, _)| *at == instance).copied().collect();
        if let Some(&place) = lent.get(choice as usize % (lent.len() + 1)) {
            let (attempt, receiver) = self.lent.remove(&place).expect("just found");
            self.word(instance, receiver, PeerWord::Prefix { request: place.1, attempt });
            return true;
        }
        let can = |work: &Work| match work {
            Work::Prompt { waits, .. } => !waits,
            Work::Decoding { .. } => true,
            Work::Room => choice % 7 == 1,
            Work::HandedOff { .. } | Work::Copying => false,
        };
        let its: Vec<_> =
            self.held.iter().filter(|((at, _), (_, work))| *at == instance && can(work)).collect();
        let Some(&(&(_, request), &(attempt, work))) = its.get(choice as usize % its.len().max(1)) else {
            return !lent.is_empty() && self.work(instance, 0);
        };
        let by = report(instance, request, attempt);
        let drawn = |index| Event::Drawn { by, index, token: (request, index), at: Seconds::ZERO };
        match work {
            Work::Prompt { hand_off, next, .. } => {
                self.say(instance, drawn(next));
                let is_last = next + 1 == ANSWER;
                let after = match hand_off {
                    Some(to) if !is_last => Some(Work::HandedOff { to }),
                    None if !is_last => Some(Work::Decoding { next: next + 1 }),
                    _ => None,
                };
                self.then(by, after);
                if let (Some(to), false) = (hand_off, is_last) {
                    self.word(instance, to, PeerWord::HandedOver { request, attempt, next: next + 1 });
                }
            }
            Work::Decoding { next } => {
                self.say(instance, drawn(next));
                self.then(by, (next + 1 < ANSWER).then_some(Work::Decoding { next: next + 1 }));
            }
            _ => {
                self.held.remove(&(instance, request));
                self.say(instance, Event::Revoked { by });
            }
        }
        true
    }

    fn then(&mut self, by: Reporter, work: Option<Work>) {
        let place = (by.instance, by.request);
        match work {
            Some(work) => _ = self.held.insert(place, (by.attempt, work)),
            None => _ = self.held.remove(&place),
        }
    }

    fn hear_report(&mut self, instance: InstanceId) -> bool {
        let Some(event) = self.reports.get_mut(&instance).and_then(VecDeque::pop_front) else { return false };
        self.past.push(event.clone());
        self.tell(event);
        true
    }

    /// Reports of earlier placements, and of requests that ended, change nothing.
    fn hear_again(&mut self, choice: u16) {
        let Some(event) = self.past.get(choice as usize % self.past.len().max(1)) else { return };
        let Some(by) = reporter(event) else { return };
        if self.machine.copies.contains(by.request) || self.machine.is_current(by) {
            return;
        }
        let (before, mut actions) = (format!("{:?}", self.machine), Vec::new());
        self.machine.step(event.clone(), &mut actions);
        assert_eq!(actions, []);
        assert_eq!(format!("{:?}", self.machine), before, "{event:?} had an effect");
    }

    fn place(&mut self, request: RequestId, choice: u16) {
        let pick = |shift: u32| InstanceId(u32::from(choice) >> shift & (INSTANCES - 1));
        let (prefill, decode, holder) = (pick(0), pick(2), pick(4));
        let pull = (holder != prefill && choice & 64 > 0).then_some(PrefixSource { holder, until: 1 });
        self.clients.entry(request).or_default().waits_for_place = false;
        self.tell(Event::Placed { request, prefill, decode, pull });
    }

    fn place_waiting(&mut self, choice: u16) -> bool {
        let waiting: Vec<RequestId> =
            self.clients.iter().filter(|(_, client)| client.waits_for_place).map(|(&id, _)| id).collect();
        waiting.iter().for_each(|&request| self.place(request, choice));
        !waiting.is_empty()
    }

    fn instance_down(&mut self, instance: InstanceId) {
        self.orders.remove(&instance);
        self.reports.remove(&instance);
        self.words.retain(|&(from, to), _| from != instance && to != instance);
        self.held.retain(|&(at, _), _| at != instance);
        self.lent.retain(|&(at, _), (_, to)| at != instance && *to != instance);
        self.held.retain(|_, (_, work)| *work != Work::HandedOff { to: instance });
        self.tell(Event::InstanceDown { instance });
        let is_lost = |request: &RequestId| {
            self.machine.place(*request).is_some_and(|place| {
                place.decode == instance || place.prefill == instance && !self.joined.contains(request)
            })
        };
        let its: Vec<RequestId> = self.clients.keys().copied().filter(is_lost).collect();
        for request in its {
            self.tell(Event::Lost { request });
            self.lost(request);
        }
        // work cancelled here ended with the instance
        self.orders.remove(&instance);
    }

    fn link_down(&mut self, a: InstanceId, b: InstanceId) {
        for (from, to) in [(a, b), (b, a)] {
            self.words.remove(&(from, to));
            self.lent.retain(|&(at, _), (_, receiver)| (at, *receiver) != (from, to));
            self.held.retain(|&(at, _), (_, work)| at != from || *work != Work::HandedOff { to });
            self.tell(Event::LinkDown { from, to });
        }
    }

    fn client_leaves(&mut self, choice: u16) {
        let open: Vec<RequestId> =
            self.clients.iter().filter(|(_, client)| client.ends == 0).map(|(&id, _)| id).collect();
        let Some(request) = open.get(choice as usize % open.len().max(1)) else { return };
        let client = self.clients.get_mut(request).expect("just found");
        (client.ends, client.waits_for_place) = (1, false);
        self.tell(Event::Cancelled { request: *request });
    }

    fn copy(&mut self, choice: u16) {
        let (holder, to) = (choice & 3, choice >> 2 & 3);
        if holder != to {
            self.copies += 1;
            let source = PrefixSource { holder: InstanceId(holder.into()), until: 1 };
            let (request, to) = (COPY + self.copies, InstanceId(to.into()));
            self.tell(Event::CopyWanted { request, source, to });
        }
    }

    fn happens(&mut self, choice: u16) {
        let (kind, detail) = (choice % 64, choice / 64);
        let instance = InstanceId(u32::from(detail) % INSTANCES);
        let other = InstanceId(u32::from(detail / 4) % INSTANCES);
        match kind {
            0..6 => self.place(self.clients.len() as u64, detail),
            6..20 => _ = self.obey(instance),
            20..34 => _ = self.hear_report(instance),
            34..42 => _ = self.hear(instance, other),
            42..54 => _ = self.work(instance, detail / 4),
            54..57 => self.hear_again(detail),
            57 => self.client_leaves(detail),
            58 => self.instance_down(instance),
            59 => self.link_down(instance, other),
            60..62 => self.copy(detail),
            _ => _ = self.place_waiting(detail),
        }
    }

    /// Everything in flight arrives, and all work is done.
    fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 10_000, "it never ends");
            let mut goes_on = self.place_waiting(round as u16);
            for instance in (0..INSTANCES).map(InstanceId) {
                goes_on |= self.obey(instance) | self.hear_report(instance) | self.work(instance, 0);
                for other in (0..INSTANCES).map(InstanceId) {
                    goes_on |= self.hear(instance, other);
                }
            }
            if !goes_on {
                return;
            }
        }
    }
}

fn run(choices: &[u16]) -> World {
    let mut world = World::default();
    choices.iter().for_each(|&choice| world.happens(choice));
    world.settle();
    for (request, client) in &world.clients {
        assert_eq!(client.ends, 1, "request {request} ends once: {:?}", world.machine);
    }
    assert!(world.held.is_empty(), "a reservation is not released: {:?}", world.held);
    assert!(world.lent.is_empty(), "a lent prefix is not released: {:?}", world.lent);
    assert!(world.machine.requests.is_empty() && world.machine.copies.is_empty());
    assert_eq!(world.copies_ended, world.copies, "a copy ends once");
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn requests_end_once_and_leave_nothing_reserved(choices in prop::collection::vec(any::<u16>(), 0..600)) {
        run(&choices);
    }
}

#[test]
fn the_interleavings_lose_places_and_complete_answers() {
    let mut random = mixfleet_hal::random::Stream::new(1);
    let choices: Vec<u16> = (0..4000).map(|_| random.below(1 << 16) as u16).collect();
    let world = run(&choices);
    let whole = world.clients.values().filter(|client| client.tokens == ANSWER).count();
    assert!(
        world.losses > 50 && whole > 50 && world.copies > 20,
        "{} {whole} {}",
        world.losses,
        world.copies
    );
}

fn placed(machine: &mut KvTransfers<Token>, pull: Option<PrefixSource>) -> Vec<Act> {
    let mut actions = Vec::new();
    let (prefill, decode) = (InstanceId(1), InstanceId(2));
    machine.step(Event::Placed { request: 7, prefill, decode, pull }, &mut actions);
    actions
}

#[test]
fn a_pull_that_its_holder_cannot_send_is_not_waited_for() {
    let (mut machine, mut actions) = (KvTransfers::default(), Vec::new());
    placed(&mut machine, Some(PrefixSource { holder: InstanceId(3), until: 16 }));
    machine.step(Event::Reserved { by: report(InstanceId(2), 7, 0), room: 0 }, &mut actions);
    actions.clear();
    machine.step(Event::InstanceDown { instance: InstanceId(3) }, &mut actions);
    let to = report(InstanceId(1), 7, 0);
    assert_eq!(actions, [Action::NotLent { to }]);
    actions.clear();
    machine.step(Event::Reserved { by: to, room: 0 }, &mut actions);
    assert_eq!(actions, [Action::NotLent { to }]);
}

#[test]
fn tokens_out_of_turn_are_told_and_not_passed_on() {
    let (mut machine, mut actions) = (KvTransfers::default(), Vec::new());
    placed(&mut machine, None);
    let by = report(InstanceId(1), 7, 0);
    let drawn = |by, index| Event::Drawn { by, index, token: (7, index), at: Seconds::ZERO };
    machine.step(drawn(by, 0), &mut actions);
    assert_eq!(actions, [Action::OutOfTurn { by, index: 0, next: 0 }], "it was given no prompt");
    actions.clear();
    machine.step(Event::Reserved { by: report(InstanceId(2), 7, 0), room: 0 }, &mut actions);
    machine.step(drawn(report(InstanceId(2), 7, 0), 1), &mut actions);
    machine.step(drawn(by, 0), &mut actions);
    let tokens =
        actions.iter().filter_map(|a| if let Action::Token { token, .. } = a { Some(token.1) } else { None });
    assert_eq!(tokens.collect::<Vec<_>>(), [0, 1]);
    actions.clear();
    machine.step(drawn(by, 1), &mut actions);
    assert_eq!(actions, [Action::OutOfTurn { by, index: 1, next: 2 }]);
}
