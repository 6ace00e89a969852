//! One dated price per part, so that a comparison has something to start from.

use super::Offer;
use crate::units::UsdPerHour;

/// A dated reference price.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReferenceOffer {
    /// The part's id in the catalog.
    pub id: &'static str,
    /// $/h of one device.
    pub usd_per_hour: f64,
    /// The offers that the price was derived from.
    pub source: &'static str,
    /// The date of the newest offer that went into it.
    pub date: &'static str,
}

/// Makes an entry from the median of the offers of providers other than aws, azure and gcp.
const fn others(id: &'static str, usd_per_hour: f64, date: &'static str) -> ReferenceOffer {
    ReferenceOffer { id, usd_per_hour, source: "built-in median of smaller clouds", date }
}

/// Makes an entry from the lowest offer of aws, azure and gcp, for parts that no other provider offered.
const fn hyperscalers(id: &'static str, usd_per_hour: f64, date: &'static str) -> ReferenceOffer {
    ReferenceOffer { id, usd_per_hour, source: "built-in least of aws, azure and gcp", date }
}

/// Makes an entry from the estimate of Step-3's authors for public clouds (arXiv 2507.19427), where no list
/// price was found.
const fn estimate(id: &'static str, usd_per_hour: f64) -> ReferenceOffer {
    ReferenceOffer { id, usd_per_hour, source: "built-in estimate of Step-3's authors", date: "2025-07-25" }
}

/// One price for each part that had one in the public price lists of May to November 2026 (gcosts, karpenter,
/// gpu-pricing by tardellirs, gpuhunt, providers' pages). Prices change, so pass your own.
pub const REFERENCE_OFFERS: &[ReferenceOffer] = &[
    others("T4", 0.66, "2026-05-24"),
    others("V100-SXM2-16GB", 0.16, "2026-05-24"),
    hyperscalers("V100-SXM2-32GB", 2.754, "2026-07-20"),
    others("A100-SXM-40GB", 1.44, "2026-09-25"),
    others("A100-SXM-80GB", 1.49, "2026-11-09"),
    others("A100-PCIe-80GB", 1.37, "2026-05-24"),
    estimate("A800-SXM-80GB", 0.75),
    others("A30", 0.41, "2026-05-24"),
    others("A40", 0.845, "2026-05-24"),
    others("A10", 1.195, "2026-09-25"),
    hyperscalers("A10G", 1.006, "2026-07-20"),
    others("RTX-A6000", 0.47, "2026-05-24"),
    others("L4", 0.44, "2026-05-24"),
    others("L40", 0.92, "2026-05-24"),
    others("L40S", 0.913, "2026-09-25"),
    others("RTX-6000-Ada", 0.77, "2026-05-24"),
    others("H100-SXM-80GB", 2.69, "2026-11-09"),
    others("H100-PCIe-80GB", 1.98, "2026-05-24"),
    others("H100-NVL-94GB", 2.285, "2026-05-24"),
    others("H200-SXM-141GB", 3.59, "2026-09-25"),
    estimate("H800-SXM-80GB", 2.0),
    estimate("H20-96GB", 0.80),
    others("GH200-96GB", 2.14, "2026-09-25"),
    others("B200-SXM", 5.89, "2026-09-25"),
    hyperscalers("GB200", 27.04, "2026-06-18"),
    others("B300-SXM", 6.94, "2026-10-07"),
    others("GB300", 7.95, "2026-05-24"),
    others("RTX-PRO-6000-WS", 1.53, "2026-05-24"),
    others("RTX-PRO-6000-SE", 1.82, "2026-09-20"),
    others("RTX-3060-12GB", 0.05, "2026-05-24"),
    others("RTX-3090", 0.2, "2026-05-24"),
    others("RTX-4090", 0.38, "2026-09-25"),
    others("RTX-5090", 0.6, "2026-05-24"),
    others("MI300X", 2.29, "2026-10-08"),
    others("MI350X", 4.4, "2026-05-24"),
    hyperscalers("TPU-v5e", 1.2, "2026-08-19"),
    hyperscalers("TPU-v5p", 4.2, "2026-08-19"),
    hyperscalers("TPU-v6e", 2.7, "2026-08-19"),
    hyperscalers("INF2", 0.758, "2026-07-20"),
    hyperscalers("TRN1", 1.344, "2026-07-20"),
    estimate("ASCEND-910B", 0.67),
];

/// Returns the built-in price of a part (case-insensitive id).
pub fn reference_offer(id: &str) -> Option<Offer> {
    let found = REFERENCE_OFFERS.iter().find(|offer| offer.id.eq_ignore_ascii_case(id))?;
    Some(Offer {
        device: found.id.into(),
        price: UsdPerHour(found.usd_per_hour),
        spot: false,
        provider: "several".into(),
        tier: "on-demand".into(),
        region: String::new(),
        source: found.source.into(),
        date: Some(found.date.into()),
    })
}
