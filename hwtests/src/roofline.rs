//! The roofline of a device: what it reaches by what it computes per byte (Williams, Waterman & Patterson
//! 2009), under a roof that was measured.

use mixfleet_report::html::Html;
use mixfleet_report::numbers::scaled;
use mixfleet_report::svg::{Chart, Mark, PlotAxis, Scale, Series};
use std::collections::BTreeMap;

/// What a roofline is drawn of.
pub(crate) struct Roofline<'a> {
    /// Bytes per second of the largest plain read.
    pub(crate) read: f64,
    /// FLOP/s of the best product, and its dtype.
    pub(crate) compute: (f64, &'a str),
    /// By kind of operation: FLOP per byte, and FLOP/s.
    pub(crate) points: BTreeMap<&'a str, Vec<(f64, f64)>>,
}

impl Roofline<'_> {
    /// Appends the chart.
    pub(crate) fn draw(self, body: &mut Html) {
        let Roofline { read, compute: (most_flops, dtype), points } = self;
        let one = |(name, points): (&str, _)| Series { name: name.to_owned(), points, mark: Mark::Dots };
        let series: Vec<Series> = points.into_iter().map(one).collect();
        let ridge = most_flops / read;
        let intensities = series.iter().flat_map(|s| &s.points).map(|p| p.0);
        let (least, most) = intensities.fold((ridge, ridge), |(l, m), x| (l.min(x), m.max(x)));
        let roof = [(least, least * read), (ridge, most_flops), (most, most_flops)];
        let x = PlotAxis { label: "FLOP per byte", unit: "", scale: Scale::Decimal };
        let y = PlotAxis { label: "arithmetic rate", unit: "FLOP/s", scale: Scale::Decimal };
        let caption = format!(
            "The roof is measured: plain read of the largest working set, {}, and the best product, {} in {dtype}. \
             Points above the slope were fed by caches.",
            scaled(read, "B/s"),
            scaled(most_flops, "FLOP/s"),
        );
        Chart { x, y, series: &series, roof: &roof, limits: &[] }.draw(body, &caption);
    }
}
