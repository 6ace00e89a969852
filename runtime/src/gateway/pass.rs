//! Requests that one engine answers and the gateway does not parse: embeddings, responses.

use super::suspects::NoPlace;
use super::{Asked, Gateway, RelayError, RelayRequest};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{EngineFault, EngineFaultKind, PassedAnswer, PassedPath};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::Event;
use mixfleet_scheduler::quarantine::AnswerMoment;
use std::sync::Arc;

/// An answer in flight, with its request's slot at the engine. Dropping it ends both.
pub(crate) struct PassedOn {
    pub(crate) answer: PassedAnswer,
    _stay: Stay,
}

/// A request's place at an engine.
struct Stay {
    gateway: Arc<Gateway>,
    request: RequestId,
    at: usize,
}

impl Drop for Stay {
    fn drop(&mut self) {
        let now = self.gateway.env.now();
        let mut state = self.gateway.lock();
        state.seats[self.at].own -= 1;
        Gateway::note_left(&mut state, self.at, now, self.request);
        // its lengths are not known, so that nothing is learned from its end
        state.front.step(Event::Cancelled { request: self.request });
    }
}

/// Whether another engine may do better than one that answers with this status.
fn is_for_another(status: u16) -> bool {
    matches!(status, 404 | 405 | 429 | 500..)
}

/// Has a request answered by the first engine that takes it.
///
/// # Errors
/// Why there is no answer.
pub(crate) async fn pass(
    gateway: &Arc<Gateway>,
    path: PassedPath,
    wanted: &RelayRequest,
) -> Result<PassedOn, RelayError> {
    let (mut avoided, mut last) = (Vec::new(), None);
    loop {
        // what an engine answered keeps its place while another one is tried
        let request = gateway.next_request();
        let undivided = Some("it passes unread");
        let asked = Asked { avoided: &avoided, undivided, ..Asked::first(request, wanted) };
        let placed = gateway.place_apart(&asked).await;
        let place = match (placed, last) {
            (Ok(place), _) => place,
            (Err(NoPlace::Quarantined(why)), _) => return Err(RelayError::Quarantined(why)),
            (Err(_), Some(Ok(passed))) => return Ok(passed),
            (Err(_), Some(Err(fault))) => return Err(RelayError::Failed(fault)),
            (Err(why), None) => return Err(why.error(gateway)),
        };
        let began = gateway.env.now();
        let stay = Stay { gateway: gateway.clone(), request, at: place.at };
        let engine = gateway.engine(place.at).clone();
        let answered = tokio::select! {
            biased;
            answered = engine.pass(path, &wanted.body) => answered,
            () = gateway.lost(place.at) => {
                Err(EngineFault::new(EngineFaultKind::Cut, "it does not answer any more"))
            }
        };
        gateway.quarantine().left(request);
        avoided.push(place.at);
        let answered = match answered {
            Ok(answer) => Ok(answer),
            Err(fault) => Err(gateway.judged(place.at, fault).await),
        };
        if answered.as_ref().is_err_and(|fault| fault.kind == EngineFaultKind::Cut) {
            gateway.note_end(wanted, (request, place.at, began), AnswerMoment::Unanswered);
        }
        last = Some(match answered {
            Ok(answer) if !is_for_another(answer.status) => return Ok(PassedOn { answer, _stay: stay }),
            Ok(PassedAnswer { status: 404 | 405 | 501, .. }) => {
                let detail = format!("no engine here answers {}", path.path());
                Err(EngineFault::new(EngineFaultKind::NotTaken, detail))
            }
            Ok(answer) => Ok(PassedOn { answer, _stay: stay }),
            Err(fault) => {
                gateway.fault(place.at, &wanted.id, &fault);
                Err(fault)
            }
        });
        if to_u32(avoided.len()) == to_u32(gateway.members.len()) {
            return last.transpose().map_err(RelayError::Failed).map(|passed| passed.expect("just set"));
        }
    }
}
