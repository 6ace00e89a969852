//! A certificate that is revoked while a session is open.

use super::*;

/// A member with separate certificate files, the only ones that use `revoked.pem`.
struct OfFiles<'a> {
    authority: &'a FleetAuthority,
    directory: std::path::PathBuf,
}

impl<'a> OfFiles<'a> {
    fn new(authority: &'a FleetAuthority, name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("mixfleet-rpc-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        OfFiles { authority, directory }
    }

    fn write(&self, name: &str, text: String) -> std::path::PathBuf {
        std::fs::write(self.directory.join(name), text).unwrap();
        self.directory.join(name)
    }

    fn trust(&self) -> Trust {
        let (certificate, key) = self.authority.0.signs(&[NAME]);
        let files = TlsFiles {
            authority: self.write("ca.pem", self.authority.0.pem()),
            certificates: self.write("member.pem", certificate),
            key: self.write("member.key", key),
            revoked: Some(self.write("crl.pem", self.authority.0.revokes(&[]))),
            fleet: NAME.into(),
        };
        known(mixfleet_wire::TlsIdentity::of_files(files, Box::new(|_| {})).unwrap())
    }
}

impl Drop for OfFiles<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ends_when_a_list_names_the_certificate_of_either_end() {
    let (env, checkpoint, authority) = (real_env(), checkpoint(), FleetAuthority::new());
    for of_caller in [true, false] {
        let files = OfFiles::new(&authority, if of_caller { "caller" } else { "called" });
        let quick = |trust| RpcConfig { silence: Duration::from_secs(4), trust };
        let (worker_trust, router_trust) = match of_caller {
            true => (files.trust(), authority.member()),
            false => (authority.member(), files.trust()),
        };
        let worker = worker(&env, &checkpoint, 1, Role::Auto, quick(worker_trust));
        let (_handle, router) = router(&env, &checkpoint, model());
        let remote = Remote::connect(&env, &worker.member.address, &quick(router_trust)).await.unwrap();
        let mut session = remote.router(&router.hello(), router.id()).await.unwrap();
        // Revoking another certificate changes nothing.
        files.write("crl.pem", authority.0.revokes(&[SERIAL + 1]));
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(!session.out.is_closed(), "several pings went by");
        files.write("crl.pem", authority.0.revokes(&[SERIAL]));
        let ended = async { while session.incoming.recv().await.is_some() {} };
        tokio::time::timeout(LONG, ended).await.expect("the session ends");
    }
}
