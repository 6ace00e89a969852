//! Reports requested points that were not measured.

use super::document::{PointStatus, ProfileDocument};
use super::work::{WorkItem, matches};

impl ProfileDocument {
    /// Returns a line for each pattern of `only` that yielded no number, saying why.
    pub fn missing(&self, only: &[String]) -> Vec<String> {
        only.iter().filter_map(|pattern| self.why_missing(pattern)).collect()
    }

    fn why_missing(&self, pattern: &str) -> Option<String> {
        let named =
            |id: &str| WorkItem::parse(id, self.device.kv_page_tokens).is_some_and(|w| matches(pattern, &w));
        let points: Vec<_> = self.points.iter().filter(|point| named(&point.id)).collect();
        if points.iter().any(|point| point.is_ok()) {
            return None;
        }
        let Some(first) = points.first() else {
            let level = format!("{:?}", self.level).to_lowercase();
            return Some(format!(
                "{pattern}: no point of the {level} level is called so; --full has more, and any full name is measured"
            ));
        };
        let status = match first.status {
            PointStatus::Unsupported => "unsupported",
            PointStatus::Skipped => "skipped",
            PointStatus::Error => "wrong or failed",
            PointStatus::Ok => "measured",
        };
        let (id, reason) = (&first.id, first.reason.as_deref().unwrap_or("no reason given"));
        Some(match points.len() {
            1 => format!("{id}: {status}: {reason}"),
            count => format!("{pattern}: none of {count} points has a number; {id}: {status}: {reason}"),
        })
    }
}
