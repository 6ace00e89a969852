//! One dated price per part, so that a comparison has something to start from.

use super::Offer;
use crate::units::UsdPerHour;

/// Who offers a part at its built-in price.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PriceSupport {
    /// This many providers other than aws, azure and gcp, beside marketplaces.
    Clouds(u32),
    /// Only aws, azure or gcp.
    Hyperscalers,
    /// Only marketplaces, on which single owners rent out what they have.
    Marketplaces,
    /// None: a paper estimates the price.
    Estimate,
}

/// A dated reference price.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReferenceOffer {
    /// The part's id in the catalog.
    pub id: &'static str,
    /// $/h of one device.
    pub usd_per_hour: f64,
    /// Who offers the part.
    pub support: PriceSupport,
    /// The date of the newest offer that went into it.
    pub date: &'static str,
}

/// Makes an entry from the median of the offers of providers other than aws, azure and gcp.
const fn clouds(id: &'static str, providers: u32, usd_per_hour: f64, date: &'static str) -> ReferenceOffer {
    ReferenceOffer { id, usd_per_hour, support: PriceSupport::Clouds(providers), date }
}

/// Makes an entry from the offers of marketplaces, for parts that no provider was seen to offer.
const fn marketplaces(id: &'static str, usd_per_hour: f64, date: &'static str) -> ReferenceOffer {
    ReferenceOffer { id, usd_per_hour, support: PriceSupport::Marketplaces, date }
}

/// Makes an entry from the lowest offer of aws, azure and gcp, for parts that no other provider offered.
const fn hyperscalers(id: &'static str, usd_per_hour: f64, date: &'static str) -> ReferenceOffer {
    ReferenceOffer { id, usd_per_hour, support: PriceSupport::Hyperscalers, date }
}

/// Makes an entry from the estimate of Step-3's authors for public clouds (arXiv 2507.19427), where no list
/// price was found.
const fn estimate(id: &'static str, usd_per_hour: f64) -> ReferenceOffer {
    ReferenceOffer { id, usd_per_hour, support: PriceSupport::Estimate, date: "2025-07-25" }
}

/// One price for each part that had one in the public price lists of May to November 2026 (gcosts, karpenter,
/// gpu-pricing by tardellirs, gpuhunt, providers' pages). Prices change, so pass your own.
pub const REFERENCE_OFFERS: &[ReferenceOffer] = &[
    clouds("T4", 2, 0.66, "2026-05-24"),
    clouds("V100-SXM2-16GB", 3, 0.16, "2026-05-24"),
    hyperscalers("V100-SXM2-32GB", 2.754, "2026-07-20"),
    clouds("A100-SXM-40GB", 6, 1.44, "2026-09-25"),
    clouds("A100-SXM-80GB", 14, 1.49, "2026-11-09"),
    clouds("A100-PCIe-80GB", 6, 1.37, "2026-05-24"),
    estimate("A800-SXM-80GB", 0.75),
    clouds("A30", 1, 0.41, "2026-05-24"),
    clouds("A40", 3, 0.845, "2026-05-24"),
    clouds("A10", 2, 1.195, "2026-09-25"),
    hyperscalers("A10G", 1.006, "2026-07-20"),
    clouds("RTX-A6000", 7, 0.47, "2026-05-24"),
    clouds("L4", 3, 0.44, "2026-05-24"),
    clouds("L40", 5, 0.92, "2026-05-24"),
    clouds("L40S", 9, 0.913, "2026-09-25"),
    clouds("RTX-6000-Ada", 5, 0.77, "2026-05-24"),
    clouds("H100-SXM-80GB", 14, 2.69, "2026-11-09"),
    clouds("H100-PCIe-80GB", 6, 1.98, "2026-05-24"),
    clouds("H100-NVL-94GB", 1, 2.285, "2026-05-24"),
    clouds("H200-SXM-141GB", 9, 3.59, "2026-09-25"),
    estimate("H800-SXM-80GB", 2.0),
    estimate("H20-96GB", 0.80),
    clouds("GH200-96GB", 2, 2.14, "2026-09-25"),
    clouds("B200-SXM", 9, 5.89, "2026-09-25"),
    hyperscalers("GB200", 27.04, "2026-06-18"),
    clouds("B300-SXM", 4, 6.94, "2026-10-07"),
    clouds("GB300", 2, 7.95, "2026-05-24"),
    clouds("RTX-PRO-6000-WS", 7, 1.53, "2026-05-24"),
    clouds("RTX-PRO-6000-SE", 2, 1.82, "2026-09-20"),
    marketplaces("RTX-3060-12GB", 0.05, "2026-05-24"),
    clouds("RTX-3090", 4, 0.2, "2026-05-24"),
    clouds("RTX-4090", 5, 0.38, "2026-09-25"),
    clouds("RTX-5090", 4, 0.6, "2026-05-24"),
    clouds("MI300X", 1, 2.29, "2026-10-08"),
    clouds("MI350X", 1, 4.4, "2026-05-24"),
    hyperscalers("TPU-v5e", 1.2, "2026-08-19"),
    hyperscalers("TPU-v5p", 4.2, "2026-08-19"),
    hyperscalers("TPU-v6e", 2.7, "2026-08-19"),
    hyperscalers("INF2", 0.758, "2026-07-20"),
    hyperscalers("TRN1", 1.344, "2026-07-20"),
    estimate("ASCEND-910B", 0.67),
];

impl ReferenceOffer {
    /// The rule by which the price was found, for display.
    fn source(&self) -> String {
        match self.support {
            PriceSupport::Clouds(1) => "built-in price of one smaller cloud".into(),
            PriceSupport::Clouds(providers) => {
                format!("built-in median of {providers} smaller clouds")
            }
            PriceSupport::Hyperscalers => "built-in least of aws, azure and gcp".into(),
            PriceSupport::Marketplaces => "built-in price of a marketplace".into(),
            PriceSupport::Estimate => "built-in estimate of Step-3's authors".into(),
        }
    }
}

/// Returns the entry of a part (case-insensitive id).
pub fn reference(id: &str) -> Option<&'static ReferenceOffer> {
    REFERENCE_OFFERS.iter().find(|offer| offer.id.eq_ignore_ascii_case(id))
}

/// Returns the built-in price of a part (case-insensitive id).
pub fn reference_offer(id: &str) -> Option<Offer> {
    let found = reference(id)?;
    Some(Offer {
        device: found.id.into(),
        price: UsdPerHour(found.usd_per_hour),
        spot: false,
        provider: "several".into(),
        tier: "on-demand".into(),
        region: String::new(),
        source: found.source(),
        date: Some(found.date.into()),
    })
}
