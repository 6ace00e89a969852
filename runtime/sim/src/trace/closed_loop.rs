//! Load as benchmarks make it: clients that each wait for an answer before they send the next request.

use super::{ConversationTurn, Request, TOKENS_MAX, TraceError};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::random::{Stream, bits};
use mixfleet_hal::units::Seconds;
use std::fmt;

/// Clients in a closed loop. Their prompts share nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClosedLoop {
    /// Number of clients, at least 1: the requests that are in progress at a time.
    pub clients: u32,
    /// Number of requests of all clients together.
    pub requests: u64,
    /// Least and most tokens of a prompt; lengths between them are equally likely.
    pub prompt_tokens: [u32; 2],
    /// Least and most tokens of an answer.
    pub output_tokens: [u32; 2],
    /// Time from an answer to the client's next request.
    pub think: Seconds,
    /// Time over which the clients' first requests are spread.
    pub ramp: Seconds,
    /// Seed of the lengths.
    pub seed: u64,
}

impl fmt::Display for ClosedLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [prompts, answers] = [self.prompt_tokens, self.output_tokens]
            .map(|[least, most]| if least == most { most.to_string() } else { format!("{least} to {most}") });
        let (clients, requests) = (self.clients, self.requests);
        write!(
            f,
            "{requests} requests of {clients} clients: prompts of {prompts} tokens, answers of {answers}"
        )
    }
}

impl ClosedLoop {
    /// All requests, one client's after the other's; a client's later ones wait for its earlier ones.
    pub fn requests(self) -> impl Iterator<Item = Result<Request, TraceError>> {
        let clients = u64::from(self.clients.max(1));
        let share = move |client: u64| self.requests / clients + u64::from(client < self.requests % clients);
        let turns = (0..clients).flat_map(move |client| {
            let count = share(client);
            (0..count).map(move |turn| (client, turn, to_u32(count - turn - 1)))
        });
        turns.zip(0..).map(move |((client, turn, left), id)| Ok(self.request(client, turn, left, id)))
    }

    fn request(&self, client: u64, turn: u64, left: u32, id: u64) -> Request {
        let mut random = Stream::new(bits(self.seed, id));
        let mut length = |[least, most]: [u32; 2]| {
            let least = least.clamp(1, TOKENS_MAX);
            let span = most.clamp(least, TOKENS_MAX) - least + 1;
            least + (to_u32(random.next_u64() >> 32) % span)
        };
        let share = client as f64 / f64::from(self.clients.max(1));
        Request {
            id,
            at: self.ramp * share,
            prompt_tokens: length(self.prompt_tokens),
            output_tokens: length(self.output_tokens),
            chain: Vec::new(),
            session: Some(ConversationTurn {
                id: client,
                after: (turn > 0).then(|| id - 1),
                think: if turn > 0 { self.think } else { Seconds::ZERO },
                left: Some(left),
            }),
            class: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_share_the_requests_and_wait_for_their_own_answers() {
        let load = ClosedLoop {
            clients: 3,
            requests: 10,
            prompt_tokens: [80, 100],
            output_tokens: [7, 7],
            think: Seconds(2.0),
            ramp: Seconds(6.0),
            seed: 1,
        };
        let requests: Vec<Request> = load.requests().map(Result::unwrap).collect();
        assert_eq!(
            requests.iter().map(|request| request.id).collect::<Vec<_>>(),
            (0..10).collect::<Vec<_>>()
        );
        let of = |client| requests.iter().filter(move |r| r.session.unwrap().id == client);
        assert_eq!([0, 1, 2].map(|client| of(client).count()), [4, 3, 3]);
        for client in 0..3 {
            let turns: Vec<_> = of(client).map(|request| request.session.unwrap()).collect();
            assert_eq!((turns[0].after, turns[0].think), (None, Seconds::ZERO));
            let ids: Vec<_> = of(client).map(|request| Some(request.id)).collect();
            assert!(turns[1..].iter().zip(&ids).all(|(t, id)| t.after == *id && t.think == Seconds(2.0)));
            assert_eq!(turns.last().unwrap().left, Some(0));
            assert!(of(client).all(|request| request.at == Seconds(2.0 * client as f64)));
        }
        assert!(requests.iter().all(|r| (80..=100).contains(&r.prompt_tokens) && r.output_tokens == 7));
        assert!(requests.windows(2).any(|pair| pair[0].prompt_tokens != pair[1].prompt_tokens));
    }
}
