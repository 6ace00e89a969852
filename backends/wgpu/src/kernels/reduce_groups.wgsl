// Sums over a group, by shared memory alone.

struct Thread {
    @builtin(local_invocation_index) id: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
}

// of a sum: GROUP terms, then as many of FOLDS
const FOLDS = 8u;
var<workgroup> partial: array<f32, GROUP * SUMS>;
var<workgroup> folded: array<f32, FOLDS * SUMS>;

// Every thread of the group calls it. Replaces each of the values by its sum over the group.
fn sums(thread: Thread, values: ptr<function, array<f32, SUMS>>) {
    workgroupBarrier();
    for (var i = 0u; i < SUMS; i++) { partial[i * GROUP + thread.id] = (*values)[i]; }
    workgroupBarrier();
    for (var f = thread.id; f < FOLDS * SUMS; f += GROUP) {
        var sum = 0.0;
        for (var j = f % FOLDS; j < GROUP; j += FOLDS) { sum += partial[f / FOLDS * GROUP + j]; }
        folded[f] = sum;
    }
    workgroupBarrier();
    for (var i = 0u; i < SUMS; i++) {
        var sum = 0.0;
        for (var f = 0u; f < FOLDS; f++) { sum += folded[i * FOLDS + f]; }
        (*values)[i] = sum;
    }
}
