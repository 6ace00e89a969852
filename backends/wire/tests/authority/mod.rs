//! Certificates for tests, from an authority that lives no longer than they do.

#![allow(dead_code, reason = "each test uses a part")]

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, IsCa, KeyPair,
    RevokedCertParams, SerialNumber,
};

/// The serial number of every certificate that an [`Authority`] signs.
pub(crate) const SERIAL: u64 = 77;

/// A certificate authority.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Its own certificate.
    pub(crate) fn pem(&self) -> String {
        self.0.as_ref().pem()
    }

    /// Its own key.
    pub(crate) fn key(&self) -> String {
        self.0.key().serialize_pem()
    }

    /// A new certificate of these names, and its key.
    pub(crate) fn signs(&self, names: &[&str]) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let names = names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let mut params = CertificateParams::new(names).unwrap();
        params.serial_number = Some(SerialNumber::from(SERIAL));
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    /// The list of revoked certificates.
    pub(crate) fn revokes(&self, serials: &[u64]) -> String {
        let day = |day| rcgen::date_time_ymd(2020, 1, day);
        let revoked = serials.iter().map(|&serial| RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: day(1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: day(1),
            next_update: day(2),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        list.signed_by(&self.0).unwrap().pem().unwrap()
    }
}
