// Sums over a group, by subgroups: a shuffle in each, then one word per subgroup in shared memory.

struct Thread {
    @builtin(local_invocation_index) id: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
}

// a subgroup has at least 4 threads
var<workgroup> partial: array<f32, GROUP / 4u * SUMS>;

// Every thread of the group calls these. `sums` replaces each of the values by its sum over the group.
fn sums(thread: Thread, values: ptr<function, array<f32, SUMS>>) {
    workgroupBarrier();
    for (var i = 0u; i < SUMS; i++) {
        let sum = subgroupAdd((*values)[i]);
        if thread.lane == 0u { partial[thread.subgroup * SUMS + i] = sum; }
    }
    workgroupBarrier();
    for (var i = 0u; i < SUMS; i++) {
        var sum = 0.0;
        for (var s = 0u; s < thread.subgroups; s++) { sum += partial[s * SUMS + i]; }
        (*values)[i] = sum;
    }
}
