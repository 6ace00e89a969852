//! Rotary embedding as checkpoints describe it, resolved to inverse frequencies.
//!
//! Every formula is that of transformers' `modeling_rope_utils.py`, in the same precision (`f32` where
//! torch holds a tensor, `f64` where Python computes), so that the tables agree to the last bits.

use super::config::Rope;
use super::error::Result;
use super::fields::Fields;
use mixfleet_hal::cast::{to_f32, to_u32};
use serde_json::{Map, Value};

const SUPPORTED: &str = "supported: default, linear, llama3, yarn, longrope";
const CONTEXT_MAX: u32 = 1 << 30;

/// Rope defaults of a family.
#[derive(Clone, Copy, Debug)]
pub(super) struct RopeDefaults {
    pub(super) theta: f64,
    /// The share of a head that is rotated; none in families that always rotate all of it.
    pub(super) partial: Option<f64>,
}

/// The extent of a rope's table: the numbers of a head that are rotated, and the positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct RopeSize {
    pub(super) rotated: u32,
    pub(super) context_max: u32,
}

/// Number of rotated numbers of each head, from the first on.
///
/// # Errors
/// The error names the field.
pub(super) fn rotated(config: &Fields, head_dim: u32, usual: RopeDefaults) -> Result<u32> {
    const FIELD: &str = "partial_rotary_factor";
    let (field, object) = parameters(config)?;
    let prefix = format!("{field}.");
    let rope = Fields { file: config.file, object: &object, prefix: &prefix };
    let (outer, inner) = (config.positive(FIELD)?, rope.positive(FIELD)?);
    let place = if inner.is_some() { &rope } else { config };
    let Some(usual) = usual.partial else {
        return match [outer, inner].into_iter().flatten().all(|factor| factor == 1.0) {
            true => Ok(head_dim),
            false => Err(place.error(FIELD, "unsupported in this family; supported: 1")),
        };
    };
    // MiniMax-M2 has the length itself
    let given = config.positive("rotary_dim")?.map(|length| length / f64::from(head_dim));
    let factor = inner.or(outer).or(given).unwrap_or(usual);
    let length = (f64::from(head_dim) * factor).floor();
    match (0..=head_dim / 2).map(|pairs| 2 * pairs).find(|even| f64::from(*even) == length) {
        Some(length) if length > 0 => Ok(length),
        _ => {
            let problem = format!("{factor} of a head of {head_dim}, expected an even part of it");
            Err(place.error(FIELD, problem))
        }
    }
}

/// Reads the rope of a configuration for a part of a head: flat `rope_parameters` (transformers 5), the same
/// nested by layer type if all types agree, or `rope_scaling` and `rope_theta` (transformers 4).
///
/// # Errors
/// The error names the field.
pub(super) fn parse(config: &Fields, size: RopeSize, usual: RopeDefaults) -> Result<Rope> {
    let (field, object) = parameters(config)?;
    let prefix = format!("{field}.");
    let rope = Fields { file: config.file, object: &object, prefix: &prefix };
    resolve(config, &rope, size, "rope_theta", usual)
}

/// Reads the ropes of full and of sliding layers, with these defaults and the field that has the theta of
/// sliding layers, if that is not in their own parameters. Parameters that are given once apply to full
/// layers alone.
///
/// # Errors
/// The error names the field.
pub(super) fn parse_by_kind(
    config: &Fields,
    size: RopeSize,
    [full, sliding]: [RopeDefaults; 2],
    sliding_theta: &str,
) -> Result<[Rope; 2]> {
    const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];
    const FIELD: &str = "partial_rotary_factor";
    let field = rope_field(config);
    let empty = Map::new();
    let object = config.object(field)?.unwrap_or(&empty);
    let is_nested = KINDS.iter().any(|kind| object.contains_key(*kind));
    let of_kind = |kind: &str, theta: &str, usual| {
        let own = match (is_nested, kind) {
            (true, _) => object.get(kind).and_then(Value::as_object).unwrap_or(&empty),
            (false, "full_attention") => object,
            (false, _) => &empty,
        };
        let prefix = if is_nested { format!("{field}.{kind}.") } else { format!("{field}.") };
        let rope = Fields { file: config.file, object: own, prefix: &prefix };
        if rope.positive(FIELD)?.or(config.positive(FIELD)?).is_some_and(|factor| factor != 1.0) {
            return Err(rope.error(FIELD, "unsupported in this family; supported: 1"));
        }
        resolve(config, &rope, size, theta, usual)
    };
    Ok([of_kind(KINDS[0], "rope_theta", full)?, of_kind(KINDS[1], sliding_theta, sliding)?])
}

/// The name of a rope's kind.
fn rope_kind<'a>(rope: &Fields<'a>) -> Result<&'a str> {
    let kind = match rope.text("rope_type")? {
        Some(kind) => kind,
        None => rope.text("type")?.unwrap_or("default"),
    };
    // early configurations of Phi-3 used this name
    let is_long = kind == "su" || kind == "yarn" && rope.has("short_factor");
    Ok(if is_long { "longrope" } else { kind })
}

/// The longest context that is computed like shorter ones: beyond, another rope applies, or queries are
/// multiplied by a number that depends on their position. None if nothing changes.
///
/// # Errors
/// The error names the field.
pub(super) fn context_limit(config: &Fields, context_max: u32) -> Result<Option<u32>> {
    let object = config.object(rope_field(config))?.cloned().unwrap_or_default();
    let rope = Fields { file: config.file, object: &object, prefix: "" };
    let beta = rope.get("llama_4_scaling_beta").and_then(Value::as_f64);
    let is_scaled = beta.is_some_and(|beta| beta != 0.0);
    if rope_kind(&rope)? != "longrope" && !is_scaled {
        return Ok(None);
    }
    Ok(Some(to_u32(original_context(config, &rope, context_max)?)))
}

fn resolve(
    config: &Fields,
    rope: &Fields,
    size: RopeSize,
    theta_field: &str,
    usual: RopeDefaults,
) -> Result<Rope> {
    let RopeSize { rotated, context_max } = size;
    // Both are checked: if one is invalid, the intended one is unclear.
    let (outer, inner) = (config.positive(theta_field)?, rope.positive("rope_theta")?);
    let theta = inner.or(outer).unwrap_or(usual.theta);
    let kind = rope_kind(rope)?;
    let powers = powers(theta, rotated);
    let base: Vec<f32> = powers.iter().map(|power| 1.0 / power).collect();
    let plain = |inv_freq| Ok(Rope { inv_freq, scale: 1.0 });
    let resolved = match kind {
        "default" => plain(base),
        "linear" => {
            let factor = to_f32(rope.positive_required("factor")?);
            plain(base.iter().map(|f| f / factor).collect())
        }
        "llama3" => plain(llama3(rope, original_context(config, rope, context_max)?, base)?),
        "yarn" => {
            let original = original_context(config, rope, context_max)?;
            yarn(rope, theta, original, context_max, &powers)
        }
        "longrope" => long_rope(rope, original_context(config, rope, context_max)?, context_max, &powers),
        other => Err(rope.error("rope_type", format!("'{other}' is not supported; {SUPPORTED}"))),
    }?;
    // Numbers that are valid in f64 may be zero or infinite in f32.
    let is_sound = |number: &f32| number.is_finite() && *number > 0.0;
    if !resolved.inv_freq.iter().chain([&resolved.scale]).all(is_sound) {
        let problem = format!("{theta} with these parameters gives frequencies that are zero or infinite");
        return Err(rope.error("rope_theta", problem));
    }
    Ok(resolved)
}

/// Multiplier of scores besides `1/sqrt(length)`, where YaRN stretches all of it (`mscale_all_dim` of
/// DeepSeek); otherwise 1.
pub(super) fn score_scale(config: &Fields) -> Result<f64> {
    let (field, object) = parameters(config)?;
    let prefix = format!("{field}.");
    let rope = Fields { file: config.file, object: &object, prefix: &prefix };
    let kind = rope_kind(&rope)?;
    let all_dim = mscale(&rope, "mscale_all_dim")?.filter(|_| kind == "yarn");
    let factor = rope.positive("factor")?.unwrap_or(1.0);
    let magnitude = all_dim.map_or(1.0, |mscale| magnitude(factor, mscale));
    Ok(magnitude * magnitude)
}

/// YaRN's multiplier of scores or angles.
fn magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// The parameters of a configuration's rope, and their field. If nested by layer type, one table serves all
/// layers, so all types must agree.
fn parameters(config: &Fields) -> Result<(&'static str, Map<String, Value>)> {
    let field = rope_field(config);
    let Some(object) = config.object(field)? else { return Ok((field, Map::new())) };
    let nested: Vec<_> = ["full_attention", "sliding_attention"]
        .iter()
        .filter_map(|kind| object.get(*kind).and_then(Value::as_object))
        .collect();
    match nested.as_slice() {
        [] => Ok((field, object.clone())),
        [first, rest @ ..] if rest.iter().all(|other| other == first) => Ok((field, (*first).clone())),
        _ => Err(config.error(field, "differs between layer types; supported: one rope for all layers")),
    }
}

fn rope_field(config: &Fields) -> &'static str {
    if config.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" }
}

/// LongRoPE (Ding et al. 2024) within the original training context: each frequency is divided by its own
/// factor.
fn long_rope(rope: &Fields, original: f64, context_max: u32, powers: &[f32]) -> Result<Rope> {
    const FIELD: &str = "short_factor";
    let list = rope.get(FIELD).and_then(Value::as_array).map(|list| list.as_slice()).unwrap_or_default();
    let factors: Vec<f64> = list.iter().filter_map(Value::as_f64).filter(|factor| *factor > 0.0).collect();
    if factors.len() != powers.len() || list.len() != powers.len() {
        let problem = format!("expected {} numbers above 0, one for each pair that is rotated", powers.len());
        return Err(rope.error(FIELD, problem));
    }
    let factor = rope.positive("factor")?.unwrap_or(f64::from(context_max) / original);
    let scale = match rope.positive("attention_factor")? {
        Some(given) => given,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    let inv_freq = factors.iter().zip(powers).map(|(factor, power)| 1.0 / (to_f32(*factor) * power));
    Ok(Rope { inv_freq: inv_freq.collect(), scale: to_f32(scale) })
}

/// The frequencies `theta ^ (2i / rotated)`.
fn powers(theta: f64, rotated: u32) -> Vec<f32> {
    (0..rotated / 2).map(|i| to_f32(theta).powf((2 * i) as f32 / rotated as f32)).collect()
}

/// The training context before rope was stretched.
fn original_context(config: &Fields, rope: &Fields, context_max: u32) -> Result<f64> {
    const FIELD: &str = "original_max_position_embeddings";
    let original = match config.count(FIELD, CONTEXT_MAX)? {
        Some(original) => original,
        None => rope.count(FIELD, CONTEXT_MAX)?.unwrap_or(context_max),
    };
    Ok(f64::from(original))
}

/// Llama 3.1 scaling: long wavelengths are stretched, short ones kept, and the range between is blended.
fn llama3(rope: &Fields, original: f64, base: Vec<f32>) -> Result<Vec<f32>> {
    let factor = to_f32(rope.positive_required("factor")?);
    let low = rope.positive_required("low_freq_factor")?;
    let high = rope.positive_required("high_freq_factor")?;
    if high <= low {
        return Err(rope.error("high_freq_factor", format!("{high}, expected more than low_freq_factor")));
    }
    let (wavelength_long, wavelength_short) = (to_f32(original / low), to_f32(original / high));
    let stretch = |f: f32| {
        let wavelength = std::f32::consts::TAU / f;
        if wavelength > wavelength_long {
            return f / factor;
        }
        if wavelength < wavelength_short {
            return f;
        }
        let smooth = (to_f32(original) / wavelength - to_f32(low)) / to_f32(high - low);
        (1.0 - smooth) * f / factor + smooth * f
    };
    Ok(base.into_iter().map(stretch).collect())
}

/// YaRN scaling (Peng et al. 2023): interpolates slow dimensions, keeps fast ones, ramps between them.
fn yarn(rope: &Fields, theta: f64, original: f64, context_max: u32, powers: &[f32]) -> Result<Rope> {
    if theta <= 1.0 {
        return Err(rope.error("rope_theta", format!("{theta}, expected more than 1 with yarn")));
    }
    let factor = rope.positive("factor")?.unwrap_or(f64::from(context_max) / original);
    let magnitude = |mscale: f64| magnitude(factor, mscale);
    let mscales = (mscale(rope, "mscale")?, mscale(rope, "mscale_all_dim")?);
    let scale = match (rope.positive("attention_factor")?, mscales) {
        (Some(given), _) => given,
        (None, (Some(mscale), Some(all_dim))) => magnitude(mscale) / magnitude(all_dim),
        _ => magnitude(1.0),
    };
    let beta_fast = rope.positive("beta_fast")?.unwrap_or(32.0);
    let beta_slow = rope.positive("beta_slow")?.unwrap_or(1.0);

    let rotated = 2.0 * powers.len() as f64;
    let turning =
        |turns: f64| rotated * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (turning(beta_fast), turning(beta_slow));
    if rope.flag("truncate", true)? {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(rotated - 1.0));
    if low == high {
        high += 0.001; // transformers does the same, to avoid 0/0
    }
    let blend = |(i, power): (usize, &f32)| {
        let ramp = ((i as f32 - to_f32(low)) / to_f32(high - low)).clamp(0.0, 1.0);
        let kept = 1.0 - ramp;
        1.0 / (to_f32(factor) * power) * (1.0 - kept) + 1.0 / power * kept
    };
    Ok(Rope { inv_freq: powers.iter().enumerate().map(blend).collect(), scale: to_f32(scale) })
}

/// A YaRN magnitude scale; zero counts as absent.
fn mscale(rope: &Fields, field: &str) -> Result<Option<f64>> {
    if rope.get(field).and_then(Value::as_f64) == Some(0.0) { Ok(None) } else { rope.positive(field) }
}
