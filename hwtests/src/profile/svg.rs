//! Curves on logarithmic axes, as inline SVG that follows the page's colours.

use super::text::scaled;
use crate::html::escape;
use std::fmt::Write as _;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 330.0;
const LEFT: f64 = 94.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 44.0;
/// Colours of the style sheet.
const COLOURS: usize = 6;

/// One curve: a name and its (x, y), both positive.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// Dots alone, without a line through them.
    pub(crate) dots: bool,
}

/// An axis: what it shows, and in which unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    pub(crate) label: &'static str,
    pub(crate) unit: &'static str,
    /// Ticks at powers of two instead of ten.
    pub(crate) binary: bool,
}

/// A curve that is drawn under the others, without a colour of its own.
pub(crate) type Roof = Vec<(f64, f64)>;

struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// Covers `values` with a little room; `None` without a positive one.
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Scale> {
        let (low, high) = values
            .filter(|v| v.is_finite() && *v > 0.0)
            .fold((f64::INFINITY, 0.0f64), |(l, h), v| (l.min(v), h.max(v)));
        (high > 0.0).then(|| Scale { low: (low / 1.25).ln(), high: (high * 1.25).ln(), from, to })
    }

    fn at(&self, value: f64) -> f64 {
        self.from + (value.ln() - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// Round values inside, at most about eight.
    fn ticks(&self, binary: bool) -> Vec<f64> {
        let base: f64 = if binary { 2.0 } else { 10.0 };
        let power = |value: f64| value / base.ln();
        let (first, last) = (power(self.low).ceil() as i32, power(self.high).floor() as i32);
        let step = ((last - first) / 8 + 1).max(1);
        let mut ticks: Vec<f64> = (first..=last).step_by(step as usize).map(|e| base.powi(e)).collect();
        if !binary && ticks.len() < 3 {
            let halves = (first - 1..=last).flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * base.powi(e)));
            ticks = halves.filter(|t| (self.low..=self.high).contains(&t.ln())).collect();
        }
        ticks
    }
}

/// A chart with a legend at its right; empty if there is nothing to draw.
pub(crate) fn chart(x: Axis, y: Axis, series: &[Series], roof: &Roof) -> String {
    let all = || series.iter().flat_map(|s| &s.points).chain(roof);
    let horizontal = Scale::over(all().map(|p| p.0), LEFT, WIDTH - RIGHT);
    let vertical = Scale::over(all().map(|p| p.1), HEIGHT - BOTTOM, TOP);
    let (Some(horizontal), Some(vertical)) = (horizontal, vertical) else { return String::new() };
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{} over {}\">",
        y.label, x.label
    );
    axes(&mut svg, (x, &horizontal), (y, &vertical));
    let path = |points: &[(f64, f64)]| {
        let place = |p: &(f64, f64)| format!("{:.1},{:.1}", horizontal.at(p.0), vertical.at(p.1));
        points.iter().map(place).collect::<Vec<_>>().join(" ")
    };
    if roof.len() > 1 {
        let _ = write!(svg, "<polyline class=\"roof\" points=\"{}\"/>", path(roof));
    }
    for (i, s) in series.iter().enumerate() {
        let colour = format!("var(--s{})", i % COLOURS);
        let dash = if i >= COLOURS { " stroke-dasharray=\"5 3\"" } else { "" };
        if !s.dots && s.points.len() > 1 {
            let points = path(&s.points);
            let _ = write!(
                svg,
                "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>"
            );
        }
        for p in &s.points {
            let (cx, cy) = (horizontal.at(p.0), vertical.at(p.1));
            let title = format!("{}: {}, {}", s.name, tick_text(x, p.0), tick_text(y, p.1));
            let _ = write!(
                svg,
                "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"2.8\" fill=\"{colour}\"><title>{}</title></circle>",
                escape(&title)
            );
        }
        let row = TOP + 10.0 + 17.0 * i as f64;
        let (from, name) = (WIDTH - RIGHT + 14.0, escape(&s.name));
        let _ = write!(
            svg,
            "<line x1=\"{from}\" x2=\"{}\" y1=\"{row}\" y2=\"{row}\" stroke=\"{colour}\" stroke-width=\"3\"{dash}/>\
             <text x=\"{}\" y=\"{}\">{name}</text>",
            from + 18.0,
            from + 24.0,
            row + 4.0
        );
    }
    svg + "</svg>"
}

fn axes(svg: &mut String, (x, horizontal): (Axis, &Scale), (y, vertical): (Axis, &Scale)) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for tick in horizontal.ticks(x.binary) {
        let at = horizontal.at(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            bottom + 16.0,
            tick_text(x, tick)
        );
    }
    for tick in vertical.ticks(y.binary) {
        let at = vertical.at(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            at + 4.0,
            tick_text(y, tick)
        );
    }
    let _ = write!(
        svg,
        "<path class=\"axis\" d=\"M{LEFT},{TOP} V{bottom} H{right}\"/>\
         <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 6.0,
        escape(x.label)
    );
}

fn tick_text(axis: Axis, value: f64) -> String {
    if axis.binary && axis.unit == "B" {
        return super::work::size(value.round() as u64);
    }
    if axis.unit.is_empty() {
        return format!("{}", (value * 100.0).round() / 100.0);
    }
    scaled(value, axis.unit).replace(".00 ", " ").replace(".0 ", " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: Axis = Axis { label: "working set", unit: "B", binary: true };
    const RATE: Axis = Axis { label: "rate", unit: "B/s", binary: false };

    #[test]
    fn points_lie_inside_and_names_are_escaped() {
        let points = vec![(65536.0, 1e11), (1e6, 9e10), (5e8, 3e10)];
        let series = [Series { name: "read <b>".into(), points, dots: false }];
        let svg = chart(BYTES, RATE, &series, &vec![]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && svg.contains("read &lt;b&gt;"));
        assert_eq!(svg.matches("<circle").count(), 3);
        for coordinate in svg.split("cx=\"").skip(1) {
            let x: f64 = coordinate.split('"').next().unwrap().parse().unwrap();
            assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x}");
        }
        assert!(svg.contains("64KiB") || svg.contains("256KiB"), "{svg}");
    }

    #[test]
    fn nothing_to_draw_draws_nothing() {
        assert_eq!(chart(BYTES, RATE, &[], &vec![]), "");
        let bad = Series { name: "x".into(), points: vec![(0.0, -1.0)], dots: true };
        assert_eq!(chart(BYTES, RATE, &[bad], &vec![]), "");
    }
}
