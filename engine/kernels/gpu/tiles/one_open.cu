bool asked = false, begun = false;
int phase = 0;
float* act = const_cast<float*>(reinterpret_cast<const float*>(state));
