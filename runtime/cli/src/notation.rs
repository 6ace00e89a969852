//! Several devices as one instance, as they are written: `tp:A,B`, `ep:A,B`, `pp:A,(tp:B,C)`, `attn:A,B`.

use crate::{backends, remote};
use mixfleet_scheduler::cost::ExpertsBy;

/// How the devices of an instance share a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Each has a share of every layer.
    Divided,
    /// The same, with whole experts.
    Experts,
    /// Each member has its own layers.
    Stages,
    /// The first has the weights, and the others attend.
    Apart,
}

impl Sharing {
    const ALL: [Sharing; 4] = [Sharing::Divided, Sharing::Experts, Sharing::Stages, Sharing::Apart];

    /// What stands before the devices.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Sharing::Divided => "tp:",
            Sharing::Experts => "ep:",
            Sharing::Stages => "pp:",
            Sharing::Apart => "attn:",
        }
    }

    /// How devices that divide every layer are written, by what they divide of experts.
    pub(crate) const fn of_layers(by: ExpertsBy) -> Self {
        match by {
            ExpertsBy::Columns => Sharing::Divided,
            ExpertsBy::Member => Sharing::Experts,
        }
    }

    /// What devices that divide layers so divide of experts; none if they do not divide layers.
    pub(crate) const fn experts_by(self) -> Option<ExpertsBy> {
        match self {
            Sharing::Divided => Some(ExpertsBy::Columns),
            Sharing::Experts => Some(ExpertsBy::Member),
            Sharing::Stages | Sharing::Apart => None,
        }
    }
}

/// What a selector names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// A device. What stands in parentheses and is no group keeps them.
    Device(String),
    Group(WrittenGroup),
}

/// Devices, or groups in parentheses, between commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WrittenGroup {
    /// The whole, without parentheses.
    pub(crate) text: String,
    pub(crate) sharing: Sharing,
    /// At least one.
    pub(crate) members: Vec<Written>,
}

impl Written {
    pub(crate) fn read(selector: &str) -> Self {
        let of = |sharing: Sharing| Some((sharing, selector.strip_prefix(sharing.word())?));
        let Some((sharing, list)) = Sharing::ALL.into_iter().find_map(of) else {
            return Written::Device(selector.to_owned());
        };
        let member = |text: String| {
            let inner = text.strip_prefix('(').and_then(|inner| inner.strip_suffix(')'));
            match inner.map(Written::read) {
                Some(group @ Written::Group(_)) => group,
                _ => Written::Device(text),
            }
        };
        let members = between_commas(list).into_iter().map(member).collect();
        Written::Group(WrittenGroup { text: selector.to_owned(), sharing, members })
    }

    /// The selectors of all its devices, in their order.
    pub(crate) fn devices(&self) -> Vec<&str> {
        match self {
            Written::Device(device) => vec![device],
            Written::Group(group) => group.members.iter().flat_map(Written::devices).collect(),
        }
    }
}

/// What stands between the commas outside of parentheses. A comma that no backend's name follows belongs to a
/// selector.
fn between_commas(list: &str) -> Vec<String> {
    let backends = backends::all();
    let starts = |part: &str| {
        let name = part.split([':', '@']).next().unwrap_or(part);
        part.is_empty()
            || part.starts_with('(')
            || part.starts_with(remote::PREFIX)
            || backends.iter().any(|backend| backend.name() == name)
    };
    let (mut found, mut depth) = (Vec::<String>::new(), 0);
    for part in list.split(',') {
        match found.last_mut() {
            Some(last) if depth > 0 || !starts(part) => *last += &format!(",{part}"),
            _ => found.push(part.to_owned()),
        }
        depth += part.matches('(').count();
        depth = depth.saturating_sub(part.matches(')').count());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(selector: &str) -> (Sharing, Vec<Written>) {
        match Written::read(selector) {
            Written::Group(WrittenGroup { sharing, members, text }) if text == selector => (sharing, members),
            other => panic!("{selector}: {other:?}"),
        }
    }

    fn device(selector: &str) -> Written {
        Written::Device(selector.to_owned())
    }

    #[test]
    fn groups_are_read_with_their_parentheses_and_words_of_selectors() {
        let two = "tp:sim:L4,dilation:0.1,sim:L4,compute,faults:f.json";
        let expected = [device("sim:L4,dilation:0.1"), device("sim:L4,compute,faults:f.json")];
        assert_eq!(members(two), (Sharing::Divided, expected.to_vec()));
        let (sharing, stages) = members("pp:(tp:cpu@0,cpu@1),remote:h:1,opencl:0");
        assert_eq!((sharing, stages.len()), (Sharing::Stages, 3));
        assert_eq!(stages[0], Written::read("tp:cpu@0,cpu@1"));
        assert_eq!(members("ep:cpu@0,remote:h:1").0, Sharing::Experts);
        assert_eq!(stages[1..], [device("remote:h:1"), device("opencl:0")]);
        let (sharing, apart) = members("attn:(pp:(tp:cpu@0,cpu@1),cpu),wgpu");
        assert_eq!((sharing, &apart[1]), (Sharing::Apart, &device("wgpu")));
        assert_eq!(Written::read("attn:(pp:(tp:a,cpu@1),cpu),wgpu").devices(), ["a", "cpu@1", "cpu", "wgpu"]);
    }

    #[test]
    fn what_is_no_group_is_a_device_as_it_stands() {
        for alone in ["cpu", "sim:L4,compute", "tp", "", "(tp:cpu@0,cpu@1)"] {
            assert_eq!(Written::read(alone), device(alone));
        }
        assert_eq!(members("tp:").1, [device("")]);
        assert_eq!(members("tp:(cpu),,cpu").1, [device("(cpu)"), device(""), device("cpu")]);
        assert_eq!(members("pp:(tp:cpu,cpu").1, [device("(tp:cpu,cpu")]);
        assert_eq!(members("pp:cpu)),cpu").1, [device("cpu))"), device("cpu")]);
    }
}
