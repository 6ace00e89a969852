#!/bin/sh
# Plants bugs in a copy of the tree, one at a time: the chaos test must find each within the seeds of CI, or another test where one is
# named.
#   hwtests/planted.sh [DIRECTORY for the copy and its build; default target/planted]
set -eu
root=$(git rev-parse --show-toplevel)
work=${1:-$root/target/planted}
mkdir -p "$work"
rm -rf "$work/tree"
git -C "$root" worktree prune
git -C "$root" worktree add --detach --quiet "$work/tree" HEAD
trap 'git -C "$root" worktree remove --force "$work/tree"' EXIT
cd "$work/tree"
export CARGO_TARGET_DIR="$work/build"

# plant NAME FILE SED-EXPRESSION [TEST FILTER]
plant() {
    test=${4:-chaos}
    filter=${5:-every_request}
    git checkout --quiet .
    sed -i "$3" "$2"
    if git diff --quiet; then
        echo "planted: '$1' no longer applies to $2" >&2
        exit 3
    fi
    cargo test --quiet -p mixfleet-runtime --test "$test" --no-run
    if found=$(cargo test -p mixfleet-runtime --test "$test" "$filter" 2>&1); then
        echo "planted: '$1' was NOT found" >&2
        exit 1
    fi
    printf 'planted: %s: found, %s\n' "'$1'" "$(printf '%s\n' "$found" | grep -o 'seed [0-9]* ([a-z ]*)' | head -n 1)"
}

plant "the hash of KV that arrives is not compared" runtime/src/engine/incoming.rs \
    's/intact = xxh3_64(copy) == hash;/let _ = (hash, copy); intact = true;/'
plant "a failure of a link leaves undone what else a step does" runtime/src/engine/worker.rs \
    's/self.contain(awaited)?;/if awaited.is_err() { self.contain(awaited)?; break; }/'
plant "an instance that is opened again keeps the sessions of its earlier life" runtime/src/fleet/hub.rs \
    's/if std::mem::take(&mut known.failed) {/if std::mem::take(\&mut known.failed) \&\& false {/'
plant "a transport writes under epochs that have ended" backends/wire/src/memory.rs \
    's/grant.filter(|(epoch, _)| \*epoch == self.epoch)/grant.or(Some((0, Access::ReadWrite)))/'
plant "the pool serves a block from disk without comparing its checksum" runtime/src/pool/check.rs \
    's/if digest != actual.to_le_bytes() {/if digest.is_empty() {/'
plant "nobody tells senders that a receiver is gone" runtime/src/engine/told.rs \
    's/ToWorker::PeerDown { peer } => self.peer_down(peer).await?,/ToWorker::PeerDown { .. } => {}/'
plant "KV of host memory is used without comparing its digest" runtime/src/pool/lease.rs \
    's/intact = xxh3_64(payload) == digest;/let _ = digest; intact = true;/'
plant "a disk that hangs is waited for" runtime/src/pool/lane.rs \
    's/Box::pin(async { result = answer.await.ok() }), limit/Box::pin(async { result = answer.await.ok() }), Duration::MAX.min(limit * 1_000_000)/'
plant "a disk that is out keeps its blocks in the index" runtime/src/pool/mod.rs \
    's/blocks.into_iter().for_each(|hash| self.events.add(hash, Tier::Ssd, false));/drop(blocks);/'
plant "names are not synced" runtime/src/pool/journal.rs \
    's/if sync { disk.sync_names() } else { Ok(()) }/Ok(())/' pool crash::
plant "a symbolic link is followed" runtime/src/pool/disk/private.rs \
    's/OFlags::RDWR | OFlags::NOFOLLOW/OFlags::RDWR/' pool private::
plant "whose file it is is not looked at" runtime/src/pool/disk/private.rs \
    's/if owner != own {/if owner != own \&\& own == u32::MAX {/' pool private::
