//! What operations on mixtures of experts must do, by sorting, and operands that try them.

use crate::cases::{Case, TokenSpread};
use crate::oracle::dot;
use crate::quantised;
use mixfleet_hal::cast::{to_f32, to_usize};
use mixfleet_hal::random::Stream;
use mixfleet_hal::{ExpertRouting, OpSig, Scoring};

/// Keys that differ by less than this may be ordered differently in f32: no case has such, except equal ones.
const GAP_MIN: f64 = 2e-5;

/// Draws of a token's logits of one kind.
const TRIES_MAX: u32 = 20;

/// The scores of a token's experts.
pub(crate) fn scores(routing: &ExpertRouting, logits: &[f64]) -> Vec<f64> {
    match routing.scoring {
        Scoring::Softmax => {
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
            logits.iter().map(|logit| (logit - max).exp() / sum).collect()
        }
        Scoring::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
    }
}

/// What a token's experts are chosen by, with a bias if there is one.
fn keys(routing: &ExpertRouting, logits: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    match bias {
        None if routing.by_logits(false) => logits.to_vec(),
        None => scores(routing, logits),
        Some(bias) => scores(routing, logits).iter().zip(bias).map(|(score, bias)| score + bias).collect(),
    }
}

/// Numbers of `values` from the highest value on; of equal ones the lower number first.
fn ordered(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order
}

/// The best keys of each group of experts, and the groups from the best one on.
fn groups(routing: &ExpertRouting, keys: &[f64]) -> (Vec<Vec<f64>>, Vec<usize>) {
    let of = |group: &[f64]| {
        let best = ordered(group).into_iter().take(routing.group_best as usize);
        best.map(|expert| group[expert]).collect::<Vec<f64>>()
    };
    let best: Vec<Vec<f64>> = keys.chunks((routing.experts / routing.groups) as usize).map(of).collect();
    let sums: Vec<f64> = best.iter().map(|keys| keys.iter().sum()).collect();
    let order = ordered(&sums);
    (best, order)
}

/// The keys of the experts that a token can choose; the others' are -inf.
fn open_keys(routing: &ExpertRouting, keys: &[f64]) -> Vec<f64> {
    let (_, order) = groups(routing, keys);
    let open = &order[..routing.groups_active as usize];
    let size = (routing.experts / routing.groups) as usize;
    let key = |(expert, &key)| if open.contains(&(expert / size)) { key } else { f64::NEG_INFINITY };
    keys.iter().enumerate().map(key).collect()
}

/// Runs `Route`.
pub(crate) fn route(sig: &OpSig, operands: &mut [Vec<f64>]) -> Result<(), String> {
    let OpSig::Route { bias, routing, .. } = *sig else {
        return Err(format!("{} chooses no experts", sig.name()));
    };
    let (experts, active) = (routing.experts as usize, routing.active as usize);
    let (mut chosen, mut weights) = (Vec::new(), Vec::new());
    for logits in operands[0].chunks(experts) {
        let keys = keys(&routing, logits, bias.then(|| &operands[1][..]));
        let best = &ordered(&open_keys(&routing, &keys))[..active];
        let scores = scores(&routing, logits);
        let sum = match (routing.normalise, routing.scoring) {
            (false, _) => 1.0,
            (true, Scoring::Softmax) => best.iter().map(|&expert| scores[expert]).sum::<f64>(),
            (true, Scoring::Sigmoid) => {
                best.iter().map(|&expert| scores[expert]).sum::<f64>() + f64::from(ExpertRouting::SUM_MIN)
            }
        };
        weights.extend(best.iter().map(|&expert| scores[expert] / sum * f64::from(routing.scale.0)));
        chosen.extend(best.iter().map(|&expert| expert as f64));
    }
    let (order, starts) = by_expert(&chosen, experts);
    let at = 1 + usize::from(bias);
    for (operand, result) in operands[at..].iter_mut().zip([chosen, weights, order, starts]) {
        *operand = result;
    }
    Ok(())
}

/// Choices by expert and number, and where each expert's begin.
fn by_expert(chosen: &[f64], experts: usize) -> (Vec<f64>, Vec<f64>) {
    let mut order: Vec<usize> = (0..chosen.len()).collect();
    order.sort_by(|&a, &b| chosen[a].total_cmp(&chosen[b]));
    let starts = (0..=experts).map(|expert| chosen.iter().filter(|&&of| to_usize(of) < expert).count());
    (order.iter().map(|&choice| choice as f64).collect(), starts.map(|start| start as f64).collect())
}

/// The expert of each choice of a `GroupedGemm`; none of a choice whose expert is not among its own.
pub(crate) fn of_choices(sig: &OpSig, operands: &[Vec<f64>]) -> Result<Vec<Option<usize>>, String> {
    let OpSig::GroupedGemm { grouped, weight, bias, .. } = *sig else {
        return Err(format!("{} has no experts", sig.name()));
    };
    let at = 1 + weight.part_count() + usize::from(bias);
    let (order, starts) = (&operands[at], &operands[at + 1]);
    let mut of_choice = vec![None; grouped.choices as usize];
    for (expert, ends) in starts.windows(2).enumerate() {
        let rows = order.get(to_usize(ends[0])..to_usize(ends[1]));
        for &choice in rows.ok_or_else(|| format!("expert {expert} has rows {ends:?} of {}", order.len()))? {
            let of = of_choice.get_mut(to_usize(choice));
            *of.ok_or_else(|| format!("index {choice} is not below {}", grouped.choices))? = Some(expert);
        }
    }
    if grouped.others == 0 && of_choice.contains(&None) {
        return Err("a choice has no expert".to_owned());
    }
    Ok(of_choice)
}

/// Runs `GroupedGemm`.
pub(crate) fn grouped_gemm(sig: &OpSig, operands: &mut [Vec<f64>]) -> Result<(), String> {
    let OpSig::GroupedGemm { grouped, n, k, weight, bias, .. } = *sig else {
        return Err(format!("{} has no experts", sig.name()));
    };
    let (n, k) = (n as usize, k as usize);
    let mut out = Vec::with_capacity(grouped.choices as usize * n);
    let decoded: Vec<f64> = quantised::decoded(sig, operands).into_iter().map(|(value, _)| value).collect();
    let weights = if weight.quantised().is_some() { &decoded } else { &operands[1] };
    let biases = &operands[1 + weight.part_count()];
    for (choice, expert) in of_choices(sig, operands)?.into_iter().enumerate() {
        let Some(expert) = expert else {
            out.extend_from_slice(&operands[operands.len() - 1][choice * n..][..n]);
            continue;
        };
        let x = &operands[0][choice / grouped.fan as usize * k..][..k];
        for line in expert * n..(expert + 1) * n {
            let added = if bias { biases[line] } else { 0.0 };
            out.push(dot(x, &weights[line * k..][..k]) + added);
        }
    }
    if let Some(last) = operands.last_mut() {
        *last = out;
    }
    Ok(())
}

/// Logits of a `Route`, token by token: some spread, some equal or all equal, so that the order of experts
/// decides, and some far apart. None is so close to another one that rounding decides.
pub(crate) fn logits(case: &Case, stream: &mut Stream) -> Vec<f64> {
    let OpSig::Route { tokens, bias, routing } = case.sig else { return Vec::new() };
    let bias = bias.then(|| correction(case));
    let mut all = Vec::new();
    for token in 0..u64::from(tokens) {
        let wanted = if case.seed.is_multiple_of(4) { 2 } else { token % 4 };
        let mut tries = 0;
        let own = loop {
            // a kind whose group sums are always too close falls back to the first
            let kind = if tries < TRIES_MAX { wanted } else { 0 };
            tries += 1;
            let one = |stream: &mut Stream| match kind {
                0 => stream.next_normal() * 2.0,
                1 => stream.below(3) as f64 - 1.0,
                2 => 0.25,
                // softmax underflows; with a bias that would leave only that
                _ => stream.next_normal() * if routing.by_logits(bias.is_some()) { 40.0 } else { 1.0 },
            };
            // to f32, as the device gets them
            let own: Vec<f64> = (0..routing.experts).map(|_| f64::from(to_f32(one(stream)))).collect();
            if is_clear(&routing, &own, bias.as_deref()) {
                break own;
            }
        };
        all.extend(own);
    }
    all
}

/// The correction bias of a `Route`: multiples of 1/16, so that there are equal ones.
pub(crate) fn correction(case: &Case) -> Vec<f64> {
    let OpSig::Route { routing, .. } = case.sig else { return Vec::new() };
    let mut stream = Stream::new(case.seed ^ 0xB1A5);
    (0..routing.experts).map(|_| stream.below(5) as f64 / 16.0).collect()
}

/// Whether what decides a choice is equal or far enough apart.
fn is_clear(routing: &ExpertRouting, logits: &[f64], bias: Option<&[f64]>) -> bool {
    if routing.by_logits(bias.is_some()) {
        return true;
    }
    let keys = keys(routing, logits, bias);
    let same = |a: usize, b: usize| logits[a] == logits[b] && bias.is_none_or(|bias| bias[a] == bias[b]);
    let (best, order) = groups(routing, &keys);
    let sum = |group: usize| best[group].iter().sum::<f64>();
    let last = routing.groups_active as usize;
    let groups_clear = order.get(last).is_none_or(|&next| {
        (0..last).all(|i| best[order[i]] == best[next] || sum(order[i]) - sum(next) >= GAP_MIN)
    });
    let order = ordered(&open_keys(routing, &keys));
    let mut pairs = order[..(routing.active as usize + 1).min(order.len())].windows(2);
    groups_clear && pairs.all(|pair| keys[pair[0]] - keys[pair[1]] >= GAP_MIN || same(pair[0], pair[1]))
}

/// `order` and `starts` of a `GroupedGemm`: which choices an expert has is random. The experts of a share
/// have one before and one behind them, which stand for all others.
pub(crate) fn grouping(case: &Case) -> (Vec<f64>, Vec<f64>) {
    let (rows, own) = match &case.spread {
        TokenSpread::Experts(rows) => (rows, 0..=rows.len()),
        TokenSpread::ExpertShare(rows) => (rows, 1..=rows.len() - 1),
        _ => return (Vec::new(), Vec::new()),
    };
    let mut of: Vec<f64> =
        rows.iter().enumerate().flat_map(|(expert, &rows)| vec![expert as f64; rows as usize]).collect();
    let mut stream = Stream::new(case.seed ^ 0x0DE5);
    for i in (1..of.len()).rev() {
        of.swap(i, to_usize(stream.below(i as u64 + 1)));
    }
    let (order, starts) = by_expert(&of, rows.len());
    (order, starts[own].to_vec())
}
