#!/usr/bin/env bash
# Plants bugs in a copy of the tree, one at a time: the chaos test must find each within 1,000 seeds, or another test where one is
# named, as for those of instances over several devices.
#   hwtests/planted.sh [DIRECTORY for the copy and its build; default target/planted]
#   hwtests/planted.sh --applies    only says which of them no longer apply to the source
# ONLY=REGEX plants those whose name matches it.
set -euo pipefail
root=$(git rev-parse --show-toplevel)
applies=${1:-}
if [ "$applies" = --applies ]; then
    cd "$root"
else
    work=${1:-$root/target/planted}
    mkdir -p "$work"
    rm -rf "$work/tree"
    git -C "$root" worktree prune
    git -C "$root" worktree add --detach --quiet "$work/tree" HEAD
    trap 'git -C "$root" worktree remove --force "$work/tree"' EXIT
    cd "$work/tree"
    export CARGO_TARGET_DIR="$work/build"
    export MIXFLEET_CHAOS_SEEDS=0..1000 MIXFLEET_OPENCL_LEVEL=full MIXFLEET_NVRTC=full MIXFLEET_GOLDEN=full
fi

missed=0
tried=0

# plant NAME FILE SED-EXPRESSION [MODULE FILTER [CRATE]]: the tests whose name holds FILTER, of the unit tests where MODULE is
# lib, of the runtime unless another crate is named
plant() {
    test=${4:-chaos}
    filter=${5:-every_request}
    crate=${6:-mixfleet-runtime}
    [[ $1 =~ ${ONLY:-} ]] || return 0
    tried=$((tried + 1))
    if [ "$applies" = --applies ]; then
        if [ ! -f "$2" ] || sed "$3" "$2" | cmp --quiet - "$2"; then
            echo "planted: '$1' no longer applies to $2" >&2
            missed=$((missed + 1))
        fi
        return
    fi
    git checkout --quiet .
    sed -i "$3" "$2"
    if git diff --quiet; then
        echo "planted: '$1' no longer applies to $2" >&2
        exit 3
    fi
    of=(--test all)
    [ "$test" = lib ] && of=(--lib)
    [ "$crate" = mixfleet-opencl ] && of+=(--features opencl)
    if ! cargo test --quiet -p "$crate" "${of[@]}" --no-run; then
        echo "planted: '$1' does not compile"
        missed=$((missed + 1))
        return
    fi
    if found=$(cargo test -p "$crate" "${of[@]}" "$filter" 2>&1); then
        echo "planted: '$1' was NOT found"
        missed=$((missed + 1))
        return
    fi
    seed=$(printf '%s\n' "$found" | grep -o 'seed [0-9]* ([a-z ]*)' | head -n 1 || true)
    printf 'planted: %s: found, %s\n' "'$1'" "${seed:-by $filter}"
}

plant "the hash of KV that arrives is not compared" runtime/src/engine/receiver.rs \
    's/copy_hash == hash,/copy_hash == hash || true,/'
plant "a failure of a link leaves undone what else a step does" runtime/src/engine/worker.rs \
    's/self.contain(awaited)?;/if awaited.is_err() { self.contain(awaited)?; break; }/'
plant "an instance that is opened again keeps the sessions of its earlier life" runtime/src/fleet/hub.rs \
    's/if std::mem::take(&mut known.failed) {/if std::mem::take(\&mut known.failed) \&\& false {/'
plant "a block of a layer with a window is given back one block too early" scheduler/src/kv/parts.rs \
    's/before(window) \/ u64::from(block_tokens.max(1)))/before(window) \/ u64::from(block_tokens.max(1)) + u64::from(computed >= u64::from(window)))/' \
    lib every_request_ends mixfleet-scheduler
plant "of a layer with a window one block too few is sent" runtime/src/engine/pages.rs \
    's/first_kept(layer, tokens, self.shape.page_tokens)/first_kept(layer, tokens + self.shape.page_tokens, self.shape.page_tokens)/' \
    engine windows::a_hand_off_sends
plant "a transport writes under epochs that have ended" backends/wire/src/memory.rs \
    's/grant.filter(|(epoch, _)| \*epoch == self.epoch)/grant.or(Some((0, RemoteAccess::ReadWrite)))/'
plant "the pool serves a block from disk without comparing its checksum" runtime/src/pool/check.rs \
    's/if digest != actual.to_le_bytes() {/if digest.is_empty() {/'
plant "senders are not notified of a lost receiver" runtime/src/engine/receiver.rs \
    's/KvMessage::Down => self.peer_down(peer)?,/KvMessage::Down => {}/'
plant "KV of host memory is used without comparing its digest" runtime/src/pool/lease.rs \
    's/intact = XxHash3_64::oneshot(payload) == digest;/let _ = digest; intact = true;/'
plant "KV of another engine is taken in unchecked" runtime/src/kv_exchange.rs \
    's/prompt.check(block, frame).and_then/prompt.check(block, frame).or(Ok::<(), KvRefusal>(())).and_then/' \
    pool exchange::a_frame_that
plant "a disk that hangs is waited for" runtime/src/pool/lane.rs \
    's/self.await_answer(job, limit)/self.await_answer(job, Duration::MAX.min(limit * 1_000_000))/' \
    pool hung::a_disk_that_hangs
plant "a disk that hangs is looked at for ever" runtime/src/pool/lane.rs \
    's/silent.0 < self.timeout.as_secs_f64()/silent.0 < 1e6 * self.timeout.as_secs_f64()/' \
    pool hung::a_read_that_nobody_waits_for
plant "a disk that is out keeps its blocks in the index" runtime/src/pool/mod.rs \
    's/blocks.into_iter().for_each(|hash| self.events.add(hash, Tier::Ssd, false));/drop(blocks);/'
plant "the end of a router's old session ends its new one" runtime/src/fleet/hub.rs \
    's/if self.routers.get(&router).is_some_and(|(current, _)| \*current == session) {/if self.routers.contains_key(\&router) {/' \
    lib old_session
plant "the end of a peer's old session ends its new one" runtime/src/fleet/hub.rs \
    's/if self.peers.get(&peer) != Some(&session) {/if !self.peers.contains_key(\&peer) {/' \
    lib old_session
plant "requests are due by the clocks of their routers" runtime/src/fleet/rights.rs \
    's/job.urgency.due += span;/let _ = (\&job, span);/' chaos take_turns
plant "a request with which instances are lost goes on for ever" scheduler/src/quarantine.rs \
    's/const UNANSWERED_ENDS_MAX: usize = 2;/const UNANSWERED_ENDS_MAX: usize = 1000;/; s/const ENDS_MAX: usize = 3;/const ENDS_MAX: usize = 1000;/'
plant "an instance out of reach counts as one that a request took with it" runtime/src/engine/suspects.rs \
    's/filter(|(_, certain)| \*certain)/filter(|(_, certain)| *certain || true)/'
plant "what a device draws is not compared with the vocabulary" runtime/src/engine/draw.rs \
    's/id if id >= vocabulary => {/id if id > vocabulary \&\& id != u32::MAX => {/'
plant "a part gets no longer for a step than its maker says" runtime/src/engine/instance/predicted.rs \
    's/STEP_TIMEOUT_FACTOR: f64 = 20.0/STEP_TIMEOUT_FACTOR: f64 = 1.0/; s/STEP_TIMEOUT_MIN: Duration = Duration::from_secs(60)/STEP_TIMEOUT_MIN: Duration = Duration::from_micros(1)/'
plant "what a grammar forbids may be drawn" runtime/src/engine/shaping.rs \
    's/FORBIDDEN_LOSS: f32 = 3e38/FORBIDDEN_LOSS: f32 = 0.0/' lib shaping::
plant "a token that was penalised is allowed again" runtime/src/engine/shaping.rs \
    's/self.forbidden.binary_search(&entry\[0\]).is_err()/true/' lib shaping::
plant "a call of an unknown tool is passed on" runtime/src/api/tool_bodies.rs \
    's/find(|(known, _)| known == name)/find(|_| true)/' lib tools::
plant "a thread is taken for granted" runtime/src/engine/instance.rs \
    's/env.spawn_worker(&name, Box::pin(worker.run())).map_err(no_thread)/env.spawn_worker(\&name, Box::pin(worker.run())).map_err(no_thread).unwrap(); Ok(())/'
plant "weights are not compared" runtime/src/fleet/session.rs \
    's/other if other.digest != ours.digest => "model"/other if other.digest.is_empty() => "model"/'
plant "versions of the protocol are not compared" runtime/src/fleet/session.rs \
    's/if protocol != PROTOCOL {/if protocol > PROTOCOL {/'
plant "a process whose id was given again goes on" runtime/src/fleet/registry/records.rs \
    's/Err(RegistryError::Taken(member.name()))$/Ok(())/; s/Some(_) => Err(RegistryError::Taken(member.name())),/Some(_) => Ok(true),/'
plant "what a silent watch does not tell is never read" runtime/src/fleet/registry/keep.rs \
    's/if whole_roll {/if whole_roll \&\& false {/'
plant "a router takes any number of requests" scheduler/src/fleet/place/mod.rs \
    's/if requests >= requests_max \&\& arrival/if requests >= requests_max.max(usize::MAX) \&\& arrival/'
plant "how a batch of a member ended is not looked at" runtime/src/model/divided.rs \
    's/wait_beside(self.queue, ticket, timeout, kv).map_err(failed)/wait_beside(self.queue, ticket, timeout, kv).map_err(failed).or(Ok(()))/' \
    chaos members_that
plant "how attention on another device ended is not looked at" runtime/src/model/apart.rs \
    's/wait(at.device, &mut \*\*queue, ticket))$/wait(at.device, \&mut **queue, ticket).or(Ok(())))/' \
    chaos members_that
plant "a group that is opened again uses what its members had before" runtime/src/engine/renew.rs \
    's/self.machine = Instance::new(self.limits.clone()).predicted_by(self.cost.clone());/if self.steps.others.is_none() { self.machine = Instance::new(self.limits.clone()).predicted_by(self.cost.clone()); }/' \
    chaos members_that
plant "queues of members are not opened again" runtime/src/engine/step.rs \
    's/self.others.as_mut().map_or(Ok(()), OtherMembers::renew_queues)/Ok(())/' \
    chaos members_that
plant "of pages that devices divide one is not given back" scheduler/src/batch/mod.rs \
    's/pages).into_iter().rev() {/pages).into_iter().rev().skip(usize::from(self.limits.page_devices.count > 1)) {/' \
    chaos members_that
plant "KV of a prompt is still sent to a receiver that was lost" runtime/src/engine/sender.rs \
    's/self.outgoing.retain(|_, outgoing| outgoing.to.to != peer);//' \
    chaos members_that
plant "members add in another order" runtime/src/model/peers.rs \
    's/let parts = self.parts(member).iter().map/let parts = self.parts(member).iter().rev().map/' \
    peers members_that mixfleet-cuda
plant "the adding member does not wait for the pushing ones" runtime/src/model/peers.rs \
    's/others.try_for_each(|(_, end)| queue.follow(&\*\*end))?;/let _ = (others.next(), \&queue);/' \
    peers members_that mixfleet-cuda
plant "members push before they have computed" runtime/src/model/peers.rs \
    's/list.push(copy(own, &self.parts(other)/list.insert(0, copy(own, \&self.parts(other)/' \
    peers members_that mixfleet-cuda
plant "members push to where others still add" runtime/src/model/peers.rs \
    's/parts\[self.pieces % TURNS\]/parts[self.pieces % TURNS * 0]/' \
    peers members_that mixfleet-cuda
plant "logits are pushed to where the first member has some that it has not moved" runtime/src/model/peers.rs \
    's/queues\[at\].follow(&\*spread)?;/let _ = \&spread;/' \
    peers members_that mixfleet-cuda
plant "the draw does not wait for logits of other members" runtime/src/model/peers.rs \
    's/queues\[0\].follow(&\*pushed)?;/let _ = pushed;/' \
    peers members_that mixfleet-cuda
plant "a stage does not wait for what it is handed" runtime/src/model/peers.rs \
    's/to.iter_mut().try_for_each(|queue| queue.follow(&\*end))?;/let _ = (to, end);/' \
    peers members_that mixfleet-cuda
plant "how a copy to the next stage ended is not looked at" runtime/src/model/divided.rs \
    's/stages\[stage\]\[0\].wait(ticket, timeout, kv)?;/let _ = (stage, ticket);/' \
    peers a_stage_that mixfleet-cuda
plant "that bytes came is not looked at" runtime/src/model/peers.rs \
    's/if got == sent {/if got.len() == sent.len() {/' \
    peers devices_that mixfleet-cuda
plant "names are not synced" runtime/src/pool/journal.rs \
    's/if sync { disk.sync_names() } else { Ok(()) }/Ok(())/' pool crash::
plant "a symbolic link is followed" runtime/src/pool/disk/private.rs \
    's/OFlags::RDWR | OFlags::NOFOLLOW/OFlags::RDWR/' pool private::
plant "whose file it is is not looked at" runtime/src/pool/disk/private.rs \
    's/if owner != own {/if owner != own \&\& own == u32::MAX {/' pool private::
# kernels of mixtures of experts, by the conformance cases
experts=backends/cpu/src/kernels/experts.rs
plant "of equal experts the higher number is chosen" $experts \
    's/best.iter().rposition(|other| other.0 >= key)/best.iter().rposition(|other| other.0 > key)/' \
    conformance one_core_conforms mixfleet-cpu
plant "the last choice of an expert is left out" backends/cpu/src/kernels/grouped.rs \
    's/rows: rows.start + row..(rows.start + row + down).min(rows.end),/rows: rows.start + row..(rows.start + row + down).min(rows.end - 1).max(rows.start + row + 1),/' \
    conformance one_core_conforms mixfleet-cpu
plant "the weight of another choice is taken" $experts \
    's/weights.at(DType::F32, choice)/weights.at(DType::F32, token * active)/' \
    conformance one_core_conforms mixfleet-cpu
plant "up is not limited" backends/cpu/src/kernels/elementwise.rs \
    's/pair\[1\].clamp(-limit, limit)/pair[1].max(-limit)/' conformance one_core_conforms mixfleet-cpu
plant "a sink has no weight where parts are merged" backends/cpu/src/kernels/attention/merge.rs \
    's/let mut sum = scalar_exp::<S>(sink - base);/let mut sum = 0.0;/' conformance one_core_conforms mixfleet-cpu
plant "a prompt's weights are not rescaled to a larger sink" backends/cpu/src/kernels/attention/prefill.rs \
    's/let keep = scalar_exp::<S>(max - max.max(sink));/let keep = 1.0;/' conformance one_core_conforms mixfleet-cpu
plant "the first expert's scales serve all" backends/cpu/src/kernels/quantised.rs \
    's/let group = which \* rows.div_ceil(group_rows) + first/let group = first/' conformance one_core_conforms mixfleet-cpu
plant "sinks join each part of a divided sequence" scheduler/src/layers/attention.rs \
    's/let bare = if self.shape.sinks { partial \* heads } else { rows };/let bare = if self.shape.sinks { 0 } else { rows };/' \
    apart every_family_gives
# KV of eight bits: by the conformance cases, whose codes are exact, and by hand-overs of the runtime
plant "a code is cut off and not rounded" hal/src/scaled.rs \
    's/(magnitude + 0x7_FFFF + (magnitude >> 20 & 1)) >> 20/magnitude >> 20/' conformance one_core_conforms mixfleet-cpu
plant "a scale is too small for the largest element" hal/src/scaled.rs \
    's/(0x01_FFFF, 6) } else { (0x1F_FFFF, 8) }/(0, 6) } else { (0, 8) }/' conformance one_core_conforms mixfleet-cpu
plant "all tokens of a page have the first one's scale" backends/cpu/src/kernels/kv.rs \
    's/self.page_tokens \* self.head_dim + token \* SCALE_BYTES/self.page_tokens * self.head_dim + token * 0/' \
    conformance one_core_conforms mixfleet-cpu
plant "values have the scales of keys" backends/cpu/src/kernels/attention/page.rs \
    's/let scale = scale(v, t);/let scale = scale(k, t);/' conformance one_core_conforms mixfleet-cpu
plant "scores are without their keys' scales" backends/opencl/src/kernels/attention.cl \
    's/SUMW(dot) \* scale_at(keys, keys->k_pool, at + j \* HEAD_DIM, t - count + j)/SUMW(dot)/' \
    conformance kernels_for_cpus_conform mixfleet-opencl
plant "heads of eight bits are counted without their scales" runtime/src/engine/pages.rs \
    's/let head = to_usize(whole.head_elements(span.wire)/let head = to_usize(u64::from(whole.head_dim)/' lib kv_of_any_devices
plant "KV crosses in the sender's dtype where the receiver keeps codes" runtime/src/engine/sender.rs \
    's/(_, b) if b.is_scaled() \&\& codes => b,/(a, b) if b.is_scaled() \&\& codes => a,/' engine eight_bits::kv_of_a_wider
plant "a latent's value is what lies behind it" backends/cpu/src/kernels/attention/page.rs \
    's/true => \*spare.add(d \* columns + t),/true => *spare.add((pools.head_dim - 1 - d) * columns + t),/' \
    conformance one_core_conforms mixfleet-cpu
plant "latents' scores have the scale of their length" backends/cpu/src/kernels/mod.rs \
    's/to_f32(shape.scale())/1.0 \/ (head_dim as f32).sqrt()/' conformance one_core_conforms mixfleet-cpu
plant "neighbours turn the other way" backends/cpu/src/kernels/elementwise.rs \
    's/(\*a \* cos - \*b \* sin, \*b \* cos + \*a \* sin)/(*a * cos + *b * sin, *b * cos - *a * sin)/' \
    conformance one_core_conforms mixfleet-cpu
wgsl=backends/wgpu/src/kernels
plant "a latent's value on wgpu is what lies behind it" $wgsl/attention.wgsl \
    's/halves(D5, b5\[(p.at5 + at + d) >> 1u\])/halves(D5, b5[(p.at5 + at + HEAD_DIM - VALUE_DIM + d) >> 1u])/' \
    conformance kernels_with_subgroups mixfleet-wgpu
plant "queries of long heads see what comes after them on wgpu" $wgsl/attention.wgsl \
    's/ \&\& base + j < tokens\[r\].y;/;/' conformance kernels_with_subgroups mixfleet-wgpu
plant "wgpu rotates the beginning of a head and not its part" $wgsl/elements.wgsl \
    's/head \* p.s.end + p.s.first + select/head * p.s.end + select/' conformance kernels_with_subgroups mixfleet-wgpu
plant "what came along with a batch is read after the host has written" backends/wgpu/src/memory.rs \
    's/^        self.change();$//' queue results_that_come mixfleet-wgpu
plant "rows of other members' experts are added again from the layer before" scheduler/src/layers/experts.rs \
    's/if is_share {/if false {/' all mixtures_give_the_oracles
plant "a member takes the rows of the first experts for those of its own" scheduler/src/layers/experts.rs \
    's/OpArg::From(Activation::ChoiceStarts, self.constants.first_expert.into())/OpArg::From(Activation::ChoiceStarts, 0)/' all mixtures_give_the_oracles
plant "keys made of latents lack the factor of scores" runtime/src/model/expanded.rs \
    's/let factor = f64::from(self.scale.0) \* f64::from(query).sqrt();/let factor = 1.0;/' all prompts_give_the_same
plant "prompts of a step have the same pages for keys made of latents" runtime/src/model/expanded.rs \
    's/first += own;/first += own * 0;/' all prompts_give_the_same
plant "a rotated part of latents goes to keys as its first number" runtime/src/model/latent.rs \
    's/if column == row { 1.0 } else { 0.0 }/if column == 0 { 1.0 } else { 0.0 }/' all prompts_give_the_same
plant "queries of expanded prompts are taken from the first row on" scheduler/src/layers/latent.rs \
    's/let elements = u64::from(sizes.lifted()) \*/let elements = 0 */' all prompts_give_the_same
plant "the cost model lifts queries of prompts that are expanded" scheduler/src/cost/counted.rs \
    's/std::iter::empty()).lifted();/std::iter::empty()).tokens;/' all every_family_costs
plant "choices of the experts before a share are computed with its first one" backends/opencl/src/kernels/grouped.cl \
    's/max(first, starts\[0\])/first/' all conformance mixfleet-opencl
cuda=backends/cuda/src
plant "weights that the batch writes before are copied early" $cuda/plan/mod.rs \
    's/self.0.iter().all(|written| apart(written, range)).into()/(range.bytes > 0).into()/' \
    lib weights_are_settled mixfleet-cuda
plant "the first launch of a batch does not wait for what is before the batch" $cuda/queue.rs \
    's/self.enqueue(work, number > 0)/self.enqueue(work, number < works.len())/' driver driver:: mixfleet-cuda
plant "a drawn token counts itself among those before it" backends/portable/sample.c \
    's/if (row->ids\[i\] < row->ids\[lid\]) before/if (row->ids[i] <= row->ids[lid]) before/' \
    emulated every_operation_conforms mixfleet-cuda
if [ "$tried" = 0 ]; then
    echo "planted: no name matches '$ONLY'" >&2
    exit 2
fi
if [ "$missed" != 0 ]; then
    [ "$applies" = --applies ] && what='do not apply' || what='not found'
    echo "planted: $missed of them $what" >&2
    exit 1
fi
[ "$applies" = --applies ] && what='apply' || what='were found'
echo "planted: all $tried of them $what"
