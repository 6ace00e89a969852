//! Curves as inline SVG that follows the page's colours.
//!
//! ```
//! use mixfleet_hwtests::svg::{Axis, Chart, Limit, Mark, Scale, Series};
//! let load = Series { name: "load".into(), points: vec![(0.0, 0.2), (60.0, 1.4)], mark: Mark::Line };
//! let x = Axis { label: "time in s", unit: "", scale: Scale::Linear };
//! let y = Axis { label: "load", ..x };
//! let svg = Chart { x, y, series: &[load], roof: &[], limits: &[Limit::Y(1.0, "objective")] }.svg();
//! assert!(svg.starts_with("<svg") && svg.contains("objective"));
//! ```

use crate::html::escape;
use crate::numbers::{scaled, size};
use mixfleet_hal::cast::{to_i32, to_u32, to_u64, to_usize};
use std::fmt::Write as _;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 330.0;
const LEFT: f64 = 94.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 44.0;
/// Colours of the style sheet.
const COLOURS: usize = 6;

/// How a curve is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A line without markers.
    Line,
    /// Markers without a line.
    Dots,
    /// A line with markers.
    Both,
}

/// One curve of (x, y) points.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Label in the legend.
    pub name: String,
    /// Points in ascending x; non-finite ones, and non-positive ones on a logarithmic axis, are left out.
    pub points: Vec<(f64, f64)>,
    /// How the curve is drawn.
    pub mark: Mark,
}

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Linear, starting at 0.
    Linear,
    /// Logarithmic, with ticks at powers of ten.
    Decimal,
    /// Logarithmic, with ticks at powers of two.
    Binary,
}

/// The label, unit and scale of an axis.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// Label of the axis.
    pub label: &'static str,
    /// Unit, which gets an SI prefix as needed; `""` means plain numbers.
    pub unit: &'static str,
    /// Scale of the axis.
    pub scale: Scale,
}

/// A named line across the chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// A vertical line at this x.
    X(f64, &'static str),
    /// A horizontal line at this y.
    Y(f64, &'static str),
}

/// Curves on a pair of axes, with a legend on the right.
#[derive(Clone, Copy, Debug)]
pub struct Chart<'a> {
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The curves, each with its own colour.
    pub series: &'a [Series],
    /// A colourless curve below the others; may be empty.
    pub roof: &'a [(f64, f64)],
    /// Lines across the chart.
    pub limits: &'a [Limit],
}

/// The range of an axis (of logarithms unless linear) and its position in the drawing.
struct Span {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Span {
    /// Covers `values` with a small margin; `None` if none can be shown.
    fn over(scale: Scale, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Span> {
        let (low, high) = values
            .filter(|&value| shows(scale, value))
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let (low, high) = match scale {
            _ if high < low => return None,
            Scale::Linear => (0.0, if high > 0.0 { high * 1.05 } else { 1.0 }),
            Scale::Decimal | Scale::Binary => ((low / 1.25).ln(), (high * 1.25).ln()),
        };
        Some(Span { scale, low, high, from, to })
    }

    fn at(&self, value: f64) -> f64 {
        let value = if self.scale == Scale::Linear { value } else { value.ln() };
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    fn contains(&self, value: f64) -> bool {
        let value = if self.scale == Scale::Linear { value } else { value.ln() };
        (self.low..=self.high).contains(&value)
    }

    /// Returns at most about eight round values inside.
    fn ticks(&self) -> Vec<f64> {
        let base: f64 = match self.scale {
            Scale::Linear => return self.linear_ticks(),
            Scale::Decimal => 10.0,
            Scale::Binary => 2.0,
        };
        let power = |value: f64| value / base.ln();
        let (first, last) = (to_i32(power(self.low).ceil()), to_i32(power(self.high).floor()));
        let step = ((last - first) / 8 + 1).max(1);
        let mut ticks: Vec<f64> = (first..=last).step_by(to_usize(step)).map(|e| base.powi(e)).collect();
        if self.scale == Scale::Decimal && ticks.len() < 3 {
            let halves = (first - 1..=last).flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * base.powi(e)));
            ticks = halves.filter(|&tick| self.contains(tick)).collect();
        }
        ticks
    }

    fn linear_ticks(&self) -> Vec<f64> {
        let least = (self.high - self.low) / 8.0;
        let power = 10f64.powf(least.log10().floor());
        let step = [1.0, 2.0, 5.0].map(|m| m * power).into_iter().find(|step| *step >= least);
        let step = step.unwrap_or(10.0 * power);
        (0..=to_u32(self.high / step)).map(|i| f64::from(i) * step).collect()
    }
}

/// Whether a value can be shown on such an axis.
fn shows(scale: Scale, value: f64) -> bool {
    value.is_finite() && (value > 0.0 || (scale == Scale::Linear && value == 0.0))
}

impl Chart<'_> {
    /// Renders the chart as SVG; empty if there is nothing to draw.
    pub fn svg(&self) -> String {
        let Chart { x, y, series, roof, limits } = *self;
        let shown: Vec<Vec<(f64, f64)>> = series.iter().map(|s| self.shown(&s.points)).collect();
        let roof = self.shown(roof);
        let all = || shown.iter().flatten().chain(&roof);
        let horizontal = Span::over(x.scale, all().map(|p| p.0), LEFT, WIDTH - RIGHT);
        let vertical = Span::over(y.scale, all().map(|p| p.1), HEIGHT - BOTTOM, TOP);
        let (Some(horizontal), Some(vertical)) = (horizontal, vertical) else { return String::new() };
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{} over {}\">",
            escape(y.label),
            escape(x.label)
        );
        axes(&mut svg, (x, &horizontal), (y, &vertical));
        if roof.len() > 1 {
            let points = path(&roof, &horizontal, &vertical);
            let _ = write!(svg, "<polyline class=\"roof\" points=\"{points}\"/>");
        }
        for (i, (series, points)) in series.iter().zip(&shown).enumerate() {
            self.curve(&mut svg, (i, series), points, (&horizontal, &vertical));
        }
        for limit in limits {
            line(&mut svg, *limit, &horizontal, &vertical);
        }
        svg + "</svg>"
    }

    fn shown(&self, points: &[(f64, f64)]) -> Vec<(f64, f64)> {
        let inside = |p: &&(f64, f64)| shows(self.x.scale, p.0) && shows(self.y.scale, p.1);
        points.iter().filter(inside).copied().collect()
    }

    /// Draws the `i`th curve and its legend entry.
    fn curve(
        &self,
        svg: &mut String,
        (i, series): (usize, &Series),
        points: &[(f64, f64)],
        (horizontal, vertical): (&Span, &Span),
    ) {
        let colour = format!("var(--s{})", i % COLOURS);
        let dash = if i >= COLOURS { " stroke-dasharray=\"5 3\"" } else { "" };
        let name = escape(&series.name);
        if series.mark != Mark::Dots && points.len() > 1 {
            let path = path(points, horizontal, vertical);
            let _ = write!(
                svg,
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}>\
                 <title>{name}</title></polyline>"
            );
        }
        // a single point needs a marker
        let dots = if series.mark == Mark::Line && points.len() > 1 { &[] } else { points };
        for p in dots {
            let (cx, cy) = (horizontal.at(p.0), vertical.at(p.1));
            let (at_x, at_y) = (tick_text(self.x, p.0), tick_text(self.y, p.1));
            let _ = write!(
                svg,
                "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"2.8\" fill=\"{colour}\">\
                 <title>{name}: {}, {}</title></circle>",
                escape(&at_x),
                escape(&at_y)
            );
        }
        let row = TOP + 10.0 + 17.0 * i as f64;
        let from = WIDTH - RIGHT + 14.0;
        let _ = write!(
            svg,
            "<line x1=\"{from}\" x2=\"{}\" y1=\"{row}\" y2=\"{row}\" stroke=\"{colour}\" stroke-width=\"3\"{dash}/>\
             <text x=\"{}\" y=\"{}\">{name}</text>",
            from + 18.0,
            from + 24.0,
            row + 4.0
        );
    }
}

fn path(points: &[(f64, f64)], horizontal: &Span, vertical: &Span) -> String {
    let place = |p: &(f64, f64)| format!("{:.1},{:.1}", horizontal.at(p.0), vertical.at(p.1));
    points.iter().map(place).collect::<Vec<_>>().join(" ")
}

/// Draws a limit if it lies inside.
fn line(svg: &mut String, limit: Limit, horizontal: &Span, vertical: &Span) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let (at, name) = match limit {
        Limit::X(x, name) if horizontal.contains(x) => {
            let at = horizontal.at(x);
            let _ =
                write!(svg, "<path class=\"roof\" stroke-dasharray=\"2 4\" d=\"M{at:.1},{TOP} V{bottom}\"/>");
            ((at + 4.0, TOP + 10.0), name)
        }
        Limit::Y(y, name) if vertical.contains(y) => {
            let at = vertical.at(y);
            let _ =
                write!(svg, "<path class=\"roof\" stroke-dasharray=\"2 4\" d=\"M{LEFT},{at:.1} H{right}\"/>");
            ((LEFT + 4.0, at - 4.0), name)
        }
        Limit::X(..) | Limit::Y(..) => return,
    };
    let _ = write!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", at.0, at.1, escape(name));
}

fn axes(svg: &mut String, (x, horizontal): (Axis, &Span), (y, vertical): (Axis, &Span)) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for tick in horizontal.ticks() {
        let at = horizontal.at(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            bottom + 16.0,
            tick_text(x, tick)
        );
    }
    for tick in vertical.ticks() {
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
    let middle = (TOP + bottom) / 2.0;
    let _ = write!(
        svg,
        "<text x=\"14\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 14 {middle})\">{}</text>",
        escape(y.label)
    );
}

fn tick_text(axis: Axis, value: f64) -> String {
    if axis.scale == Scale::Binary && axis.unit == "B" {
        return size(to_u64(value.round()));
    }
    if axis.unit.is_empty() {
        return format!("{}", (value * 1e4).round() / 1e4);
    }
    scaled(value, axis.unit).replace(".00 ", " ").replace(".0 ", " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: Axis = Axis { label: "working set", unit: "B", scale: Scale::Binary };
    const RATE: Axis = Axis { label: "rate", unit: "B/s", scale: Scale::Decimal };
    const TIME: Axis = Axis { label: "time", unit: "", scale: Scale::Linear };

    fn chart(x: Axis, y: Axis, series: &[Series], limits: &[Limit]) -> String {
        Chart { x, y, series, roof: &[], limits }.svg()
    }

    #[test]
    fn points_lie_inside_and_names_are_escaped() {
        let points = vec![(65536.0, 1e11), (1e6, 9e10), (5e8, 3e10)];
        let series = [Series { name: "read <b>".into(), points, mark: Mark::Both }];
        let svg = chart(BYTES, RATE, &series, &[]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && svg.contains("read &lt;b&gt;"));
        assert_eq!(svg.matches("<circle").count(), 3);
        for coordinate in svg.split("cx=\"").skip(1) {
            let x: f64 = coordinate.split('"').next().unwrap().parse().unwrap();
            assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x}");
        }
        assert!(svg.contains("64KiB") || svg.contains("256KiB"), "{svg}");
        // Both axes are labelled, and the ticks have their units.
        assert!(svg.contains(">working set</text>") && svg.contains(">rate</text>"), "{svg}");
        assert!(svg.contains("GB/s<"), "{svg}");
    }

    #[test]
    fn a_linear_axis_begins_at_zero_and_a_limit_shows_where_it_is_inside() {
        let points = vec![(0.0, 0.0), (f64::NAN, 1.0), (600.0, 3.7)];
        let series = [Series { name: "load".into(), points, mark: Mark::Line }];
        let svg =
            chart(TIME, TIME, &series, &[Limit::Y(1.0, "in"), Limit::Y(9.0, "out"), Limit::X(-1.0, "left")]);
        assert!(svg.contains(&format!("points=\"{LEFT:.1},{:.1} ", HEIGHT - BOTTOM)), "{svg}");
        assert_eq!((svg.matches("<circle").count(), svg.matches("NaN").count()), (0, 0));
        assert!(svg.contains(">in<") && !svg.contains(">out<") && !svg.contains(">left<"));
        for tick in ["100", "600", "0.5", "3.5"] {
            assert!(svg.contains(&format!(">{tick}<")), "{tick}: {svg}");
        }
        let still = [Series { name: "none".into(), points: vec![(1.0, 0.0), (2.0, 0.0)], mark: Mark::Line }];
        assert!(chart(TIME, TIME, &still, &[]).contains("<polyline"));
    }

    #[test]
    fn nothing_to_draw_draws_nothing() {
        assert_eq!(chart(BYTES, RATE, &[], &[]), "");
        let bad = Series { name: "x".into(), points: vec![(0.0, -1.0)], mark: Mark::Dots };
        assert_eq!(chart(BYTES, RATE, &[bad], &[]), "");
    }
}
